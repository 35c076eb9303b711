"""The Coordinator's state of each slave, cluster, push, pull and round: plain records that only it changes.

Legal states and moves are in enums.py, the collection of all of them in run_state.py, the handlers that change them in
the modules that are named after them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import field
from statistics import median

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.ids import PullId, PushId, VersionId, reads_only
from dips.outer_step import NO_STEP, Factors, OuterStep
from dips.protocol import enums
from dips.protocol.claims import ToldProgress
from dips.protocol.data import BegunRange
from dips.protocol.effects import OrderBody
from dips.protocol.events import Answer, MirrorReport
from dips.protocol.records import OutcomeRow
from dips.protocol.releases import added
from dips.protocol.verdicts import Verdict

IDLE_ROWS = 50  # burst: rows of the audit for requests that changed nothing
IDLE_ROW_S = 30.0  # one more row per this time: at most 3,000 a day, some 600 kB of a ledger
INCARNATIONS = 100  # burst: of one cluster
INCARNATION_S = 2.0  # one more per this time: as often as anybody joins who then moves anything
PACES_KEPT = 16  # latest intervals between pushes of a cluster, for the window's default and for pushes to expect

Bodies = dict[str, OrderBody]  # slave → its order
Subject = PushId | PullId | int | VersionId  # what an order is about; an int is the number of a round


@dataclass
class Slave:
    """One holder of layers, named by the placement; Register gives it an incarnation."""

    name: str
    layers: tuple[int, ...]
    place: int = 0  # among the slaves of the run
    sinc: int = 0
    nonce: str = ""
    state: enums.SlaveState = enums.SlaveState.AWAITED
    cause: enums.SlaveCause = enums.SlaveCause.UNREGISTERED
    reason: str = "not registered since this master started"  # the cause, for people
    since: float = 0.0  # when state or cause changed last
    address: str = ""
    lanes: tuple[str, ...] = ()
    key: str = ""
    slots: int = 0
    memory: VersionId | None = None
    offer: frozenset[VersionId] | None = None  # versions that it offers to serve; None: not computed since that changed
    unread: frozenset[VersionId] = frozenset()  # on its disk and not verified: it offers them when it has read them
    unanswered: int = 0  # orders in a row that missed their deadline
    mirror: MirrorReport | None = None  # as last reported, also while it is lost, when its mirror is needed
    covered: VersionId | None = None  # newest version its mirror had while both worked: see mirrors.known_lag
    mirrored: tuple[VersionId, ...] = ()  # versions kept on every disk for its mirror: see durability.py
    unseeded: bool = False  # its layers of v0@r0 are not on its disk
    needs_ping: bool = False  # lost as unresponsive: becomes READY only after it has answered a Ping
    newest_protocol: int = added(2, 0)  # that it speaks, as it registered; 0: unknown
    drained: bool = added(2, False)  # an operator was told that this process may be stopped

    def set_state(self, state: enums.SlaveState, cause: enums.SlaveCause, reason: str, now: float) -> None:
        """Enter a state, or stay in it for another reason."""
        if (state, cause) != (self.state, self.cause):
            self.since = now
        if state != self.state:
            self.state = enums.check_move(enums.SLAVE_MOVES, self.state, state, f"slave {self.name}")
        self.cause, self.reason = cause, reason


@dataclass
class Push:
    """One push from OpenPush to its Outcome."""

    id: PushId
    base: VersionId
    ranks: int
    deadline: float  # extended while it makes progress, see transfers.py
    deadline_s: float
    due: float = 0.0  # when it should be complete, by its cluster's bandwidth; 0 while that is unknown
    idle_s: float = 0.0  # open but not moving until then, as its cluster says
    codec: Codec = Codec.FP32
    opened_at: float = 0.0  # its work was done before; not shifted by Blind, since clusters train meanwhile
    opened: bool = False
    first: int = 0  # its rank r is worker first + r of all pushes
    unstaged: dict[str, None] = field(default_factory=dict)  # slaves that do not have all of it yet
    committed: bool = False
    committed_at: float = 0.0
    tokens: int = 0
    counted: int = 0  # tokens that count once it is folded: see rules.py
    inner_steps: int = 0
    ranges: tuple[int, ...] = ()
    begun: BegunRange | None = None
    loss: float | None = None  # None: the training script gave none
    verdict: Verdict | None = None
    weight: float = 0.0  # as in Fold
    layer_weights: Factors = ()
    merge_weight: float = 0.0  # by `outer.weights`, before the norms of layers change it
    was_held: bool = False  # it has waited for the others of its round: see round.py
    was_against: bool = False  # and it points away from the pushes that were folded before it waited

    @property
    def layer_sq(self) -> tuple[float, ...]:
        """Σ(θ − θ_j)² of each layer, as measured; empty before."""
        return self.verdict.evidence.layer_sq if self.verdict is not None else ()

    @property
    def held_ranges(self) -> tuple[int, ...]:
        """Data ranges that are withheld from other clusters until the push is settled."""
        return self.ranges if self.begun is None else (*self.ranges, self.begun.number)


@dataclass
class Pull:
    """One pull from OpenPull to FinishPull; `opened` when every slave has pinned the version."""

    id: PullId
    version: VersionId
    ranks: int
    deadline: float
    deadline_s: float
    opened: bool = False
    first: int = 0  # number of ranks of the pulls before it: its own take turns after those
    momentum: bool = added(2, False)  # of m, not θ
    digests: tuple[tuple[str, tuple[str, ...]], ...] = added(2, ())  # of a pull of m: those of each slave's layers


@dataclass
class Seed:
    """The transfer of v0@r0 to the slaves that lack it, or of a saved model to all; not kept over a restart of the
    master.
    """

    push: PushId
    seeder: str  # nonce of the process that sends it
    deadline: float  # extended whenever it is asked for again
    slaves: dict[str, int]  # slaves that have yet to keep it → their incarnation
    opened: bool = False  # all these slaves have a slot for it
    unstaged: dict[str, None] = field(default_factory=dict)
    recovery: Recovery | None = added(2, None)  # None: it is v0@r0


@dataclass
class Recovery:
    """The version that a saved model becomes."""

    version: VersionId  # of a reserved round
    parent: VersionId  # the head, which a slave has lost
    source: str
    digests: tuple[str, ...]  # of θ of each layer
    kept: dict[str, str] = field(default_factory=dict)  # slave → digest of the manifest on its disk
    without: dict[str, None] = field(default_factory=dict)  # slaves that had no snapshot to take m from


@dataclass
class Rebalance:
    """A rebalance whose layers are being copied; not kept over a restart of the master."""

    slaves: tuple[str, ...]  # of the new placement
    version: VersionId  # the head, which their hosts copy
    deadline: float  # extended whenever one of the hosts asks
    staged: dict[str, str] = field(default_factory=dict)  # slave → digest of the manifest that its host has staged
    valid: bool = False  # its row is emitted: this process ends


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The last push or pull of a cluster that ended without an Outcome, and why, for repeated questions."""

    seq: int = 0  # 0: none so far
    reason: str = ""


@dataclass
class Cluster:
    """One training cluster in its present incarnation."""

    name: str
    inc: int
    nonce: str
    frozen_digest: str = ""  # digest of its frozen parameters; "": not known to this master
    state: enums.ClusterState = enums.ClusterState.JOINING
    cause: enums.ClusterCause = enums.ClusterCause.JOINED
    reason: str = "joined"  # the cause, for people
    since: float = 0.0  # when state or cause changed last
    seq_high: int = 0  # the highest seq of a push or pull in this incarnation
    base: VersionId | None = None
    ranks: int = 1
    keys: tuple[str, ...] = ()  # public keys of those ranks, as of its last push or pull
    moving: bool = True  # its inner steps advance
    read_before: bool = False  # it only pulls, and this incarnation has pulled a version
    consumed: int = 0  # tokens of this incarnation in all, as last reported by the Judge
    lost: int = 0  # part of `consumed`: tokens lost with dead trainers
    told: ToldProgress | None = None  # reported by heartbeats of this incarnation; None: no report yet
    claims_refused: int = 0  # since this master started
    works_since: float | None = None  # begin of the work that is not settled; None: before this master's start
    settled: int = 0  # tokens of this incarnation that were accepted or gated
    last_tokens: int = 0  # tokens of its last accepted push; 0: none is known
    settled_steps: int = 0  # inner steps of this incarnation that were accepted or gated, under this master
    accounted: int = 0  # tokens of the last ended incarnation: settled, lost, or in its last push
    in_window: int = 0  # pushes that are committed and not settled; some of ended incarnations never will be
    tokens_in_window: int = 0  # tokens of those pushes
    push: Push | None = None
    pull: Pull | None = None
    dropped_push: Tombstone = Tombstone()
    closed_pull: Tombstone = Tombstone()
    outcome: OutcomeRow | None = None
    outcome_version: VersionId | None = None
    last_outcome: OutcomeRow | None = None  # also of the incarnation before; None: no outcome yet
    bytes_per_s: float | None = None  # from its heartbeats; kept over incarnations, since it belongs to the link
    measured_at: float = 0.0
    requested_at: float | None = None  # time of its last RequestPush that was granted
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACES_KEPT))
    counts: dict[str, int] = field(default_factory=lambda: {"accepted": 0, "gated": 0, "skipped": 0, "undone": 0})
    tokens: dict[str, int] = field(default_factory=lambda: {"accepted": 0, "gated": 0, "lost": 0, "undone": 0})
    newest_protocol: int = added(2, 0)  # that this incarnation speaks; 0: not known to this master
    joins_left: float = added(2, float(INCARNATIONS))  # incarnations that may begin, at `joins_left_at`
    joins_left_at: float = added(2, 0.0)

    def take_join(self, now: float) -> bool:
        """Take an incarnation from those that may begin; return False if none is left. It is refilled with time."""
        self.joins_left = min(float(INCARNATIONS), self.joins_left + (now - self.joins_left_at) / INCARNATION_S)
        self.joins_left_at = now
        if self.joins_left < 1.0:
            return False
        self.joins_left -= 1.0
        return True

    @property
    def live(self) -> bool:
        return self.state is not enums.ClusterState.GONE

    @property
    def reads(self) -> bool:
        """Whether it only pulls: nothing waits for it, and nothing that it says of training counts."""
        return reads_only(self.name)

    @property
    def trains(self) -> bool:
        """Whether it lives and may push."""
        return self.live and not self.reads

    @property
    def push_interval_s(self) -> float | None:
        """Median seconds between two pushes; None before the second."""
        return median(self.paces) if self.paces else None

    @property
    def settled_tokens(self) -> int:
        """Tokens that rounds have settled, over all its incarnations."""
        return self.tokens["accepted"] + self.tokens["gated"] + self.tokens["undone"]

    def set_state(self, state: enums.ClusterState, cause: enums.ClusterCause, reason: str, now: float) -> None:
        """Enter a state, or stay in it for another reason."""
        if (state, cause) != (self.state, self.cause):
            self.since = now
        if state != self.state:
            self.state = enums.check_move(enums.CLUSTER_MOVES, self.state, state, f"cluster {self.name}")
        self.cause, self.reason = cause, reason

    def begin_incarnation(self, inc: int, nonce: str, now: float) -> None:
        """Start anew under the same name: counters stay, transfers and the outcome are dropped."""
        self.inc, self.nonce = inc, nonce
        self.state, self.cause, self.reason, self.since = (
            enums.ClusterState.JOINING,
            enums.ClusterCause.JOINED,
            "joined",
            now,
        )
        self.seq_high, self.base, self.moving, self.read_before = 0, None, not self.reads, False
        self.consumed = self.lost = self.settled = self.settled_steps = 0
        self.told = None
        self.keys = ()
        self.push = self.pull = self.outcome = self.outcome_version = self.requested_at = None
        self.dropped_push = self.closed_pull = Tombstone()


@dataclass
class Round:
    """One attempt at an outer step."""

    number: int
    state: enums.RoundState
    reason: str
    opened: float
    closes: float
    window_s: float = 0.0  # planned length, before anything extended it
    queue: deque[Push] = field(default_factory=deque)  # committed pushes that are to be measured, in this order
    current: Push | None = None  # push that is being measured or folded
    folded: list[Push] = field(default_factory=list)
    gated: list[Push] = field(default_factory=list)
    held: list[Push] = field(default_factory=list)  # pushes that keep their slots until the others are folded
    flagged: bool = False  # some push is left out of some layer
    acc_sq: tuple[float, ...] = ()  # Σ acc² of each layer, after the last fold
    step: OuterStep = NO_STEP  # as in its Apply; `dips set` may change options meanwhile
    delta_norm: float = 0.0
    clipped: bool = False
    theta_digest: int = 0  # of θ′, once it is applied
    step_norm: float = 0.0  # ‖θ′ − θ‖, summed over layers; 0: unknown

    @property
    def pushes(self) -> list[Push]:
        return [*self.folded, *self.gated, *([self.current] if self.current else ()), *self.queue, *self.held]

    @property
    def count(self) -> int:
        """Number of pushes in the round."""
        return len(self.folded) + len(self.gated) + len(self.queue) + len(self.held) + (self.current is not None)


@dataclass
class Fanout:
    """One order given to several slaves; complete when all have answered."""

    kind: enums.FanoutKind
    subject: Subject
    waiting: dict[str, int] = field(default_factory=dict)  # slave that has not answered → number of its order
    first: int = 0  # number of its first order, its key in the order book
    unanswered: int = 0  # number of its orders that are in the order book
    answers: dict[str, Answer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeAdmission:
    """The key of a cluster's last probe, and the order that sends it to the slaves."""

    key: str
    fanout: Fanout


@dataclass
class Durability:
    """State of the run's snapshots."""

    state: enums.DurabilityState = enums.DurabilityState.DURABLE
    reason: str = ""
    failures: int = 0  # snapshots in a row that failed on some slave
    late: Fanout | None = None  # the order to write the head's snapshot after its commit
    late_failed: tuple[str, ...] = ()  # failures by slave, while other slaves still write
    again_at: float = 0.0  # earliest time at which a failed snapshot of the head is tried again


@dataclass
class AuditBudget:
    """The rows left for requests that changed nothing (operator.py): a token bucket, refilled with time."""

    at: float
    left: float = float(IDLE_ROWS)
    passed_over: int = 0  # requests since the last row for which there was no room

    def take_row(self, now: float) -> bool:
        """Take one row from the budget; return False, and count the request as passed over, if none is left."""
        self.left = min(float(IDLE_ROWS), self.left + (now - self.at) / IDLE_ROW_S)
        self.at = now
        if self.left < 1.0:
            self.passed_over += 1
            return False
        self.left -= 1.0
        return True

    def take_passed_over(self) -> int:
        """Return the number of requests without a row since the last call, and reset it."""
        passed_over, self.passed_over = self.passed_over, 0
        return passed_over
