"""What the Coordinator keeps of each slave, cluster, push, pull and round: plain records that only it changes.

Legal states and moves are in moves.py, the whole of them together in run_state.py, what changes them in the modules
that are named after them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import field
from statistics import median

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.ids import PullId, PushId, VersionId
from dips.outer_step import NO_STEP, Factors, OuterStep
from dips.protocol.claims import ToldProgress
from dips.protocol.data import BegunRange
from dips.protocol.effects import OrderBody
from dips.protocol.enums import ClusterCause, DurabilityState, FanoutKind, SlaveCause
from dips.protocol.events import Answer, MirrorReport
from dips.protocol.moves import CLUSTER_MOVES, SLAVE_MOVES, ClusterState, RoundState, SlaveState, check_move
from dips.protocol.records import OutcomeRow
from dips.protocol.verdicts import Verdict

PACES_KEPT = 16  # times between pushes of a cluster, for the window's default and for who is expected

Bodies = dict[str, OrderBody]  # slave → its order
Subject = PushId | PullId | int | VersionId  # what an order is about; an int is the number of a round


@dataclass
class Slave:
    """One holder of layers; the placement names it, a Register gives it an incarnation."""

    name: str
    layers: tuple[int, ...]
    place: int = 0  # among the slaves of the run
    sinc: int = 0
    nonce: str = ""
    state: SlaveState = SlaveState.AWAITED
    cause: SlaveCause = SlaveCause.UNREGISTERED
    reason: str = "not registered since this master started"  # the cause, for people
    since: float = 0.0  # when state or cause changed last
    address: str = ""
    lanes: tuple[str, ...] = ()
    key: str = ""
    slots: int = 0
    memory: VersionId | None = None
    offer: frozenset[VersionId] | None = None  # what it offers to serve; None: not named since that changed
    unanswered: int = 0  # orders in a row past their deadline
    mirror: MirrorReport | None = None  # as last told, also while it is lost: that is what its mirror is for
    covered: VersionId | None = None  # by its mirror, while that worked and the slave served: see mirrors.known_lag
    mirrored: tuple[VersionId, ...] = ()  # what stays on every disk for its mirror's sake: see mirrors.py
    unseeded: bool = False  # its layers of v0@r0 are not on its disk
    needs_ping: bool = False  # it was lost as unresponsive: READY again only after it has answered a Ping

    def set_state(self, state: SlaveState, cause: SlaveCause, reason: str, now: float) -> None:
        """Enter a state, or stay in it for another reason."""
        if (state, cause) != (self.state, self.cause):
            self.since = now
        if state != self.state:
            self.state = check_move(SLAVE_MOVES, self.state, state, f"slave {self.name}")
        self.cause, self.reason = cause, reason


@dataclass
class Push:
    """One push from OpenPush to its Outcome."""

    id: PushId
    base: VersionId
    ranks: int
    deadline: float  # moves on, see movement.py
    deadline_s: float
    due: float = 0.0  # when it should be here, by its cluster's bandwidth; 0 while that is unknown
    idle_s: float = 0.0  # in that time: open but not moving, as its cluster says
    codec: Codec = Codec.FP32
    opened_at: float = 0.0  # what it brings was done before; not moved by Blind: clusters train meanwhile
    opened: bool = False
    first: int = 0  # its rank r is worker first + r of all that push
    unstaged: dict[str, None] = field(default_factory=dict)  # slaves that do not have all of it yet
    committed: bool = False
    committed_at: float = 0.0
    tokens: int = 0
    counted: int = 0  # of these, once it is folded: see rules/weights.py
    inner_steps: int = 0
    ranges: tuple[int, ...] = ()
    begun: BegunRange | None = None
    loss: float | None = None  # None: its script gave none
    verdict: Verdict | None = None
    weight: float = 0.0  # as in Fold
    layer_weights: Factors = ()
    merge_weight: float = 0.0  # before any layer's norm: by `outer.weights`
    was_held: bool = False  # it has waited for the others of its round: see held_pushes.py
    was_against: bool = False  # and points away from those that were folded before it waited

    @property
    def layer_sq(self) -> tuple[float, ...]:
        """Σ(θ − θ_j)² of each layer, as measured."""
        return self.verdict.evidence.layer_sq if self.verdict is not None else ()

    @property
    def held_ranges(self) -> tuple[int, ...]:
        """Data ranges that nobody else may have before it is settled."""
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
    first: int = 0  # ranks of the pulls before it: its own begin at the slaves after theirs


@dataclass
class Seed:
    """v0@r0 on its way to the slaves that lack it; forgotten by a master that restarts."""

    push: PushId
    seeder: str  # nonce of the process that brings it
    deadline: float  # unless it is asked for again
    slaves: dict[str, int]  # that have yet to keep it → the incarnation that is asked to
    opened: bool = False  # all of them take it
    unstaged: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The last push or pull of a cluster that ended without an Outcome: a repeated question is answered with why."""

    seq: int = 0  # 0: none so far
    reason: str = ""


@dataclass
class Cluster:
    """One training cluster in its present incarnation."""

    name: str
    inc: int
    nonce: str
    frozen_digest: str = ""  # of what it does not train; "": not known to this master
    state: ClusterState = ClusterState.JOINING
    cause: ClusterCause = ClusterCause.JOINED
    reason: str = "joined"  # the cause, for people
    since: float = 0.0  # when state or cause changed last
    seq_high: int = 0  # the highest seq of a push or pull in this incarnation
    base: VersionId | None = None
    ranks: int = 1
    keys: tuple[str, ...] = ()  # public, of those ranks, as its last push or pull named them
    moving: bool = True  # its inner steps are seen moving
    consumed: int = 0  # tokens of this incarnation in all, as last reported by the judge
    lost: int = 0  # of those, with dead trainers
    told: ToldProgress | None = None  # by heartbeats of this incarnation; None: nobody reported any
    claims_refused: int = 0  # since this master started
    works_since: float | None = None  # what is not settled was done since then; None: before this master's start
    settled: int = 0  # tokens of this incarnation that were accepted or gated
    last_tokens: int = 0  # of its last accepted push; 0: it had none that is known
    settled_steps: int = 0  # inner steps likewise, under this master
    accounted: int = 0  # tokens of the newest incarnation that is over: settled, lost, or with its last push
    in_window: int = 0  # pushes of all its incarnations that are committed, and not settled
    tokens_in_window: int = 0  # of those
    push: Push | None = None
    pull: Pull | None = None
    dropped_push: Tombstone = Tombstone()
    closed_pull: Tombstone = Tombstone()
    outcome: OutcomeRow | None = None
    outcome_version: VersionId | None = None
    last_outcome: OutcomeRow | None = None  # also while another push is open, and of its incarnation before
    bytes_per_s: float | None = None  # of its transfers, by its heartbeats; kept over incarnations: it is its link's
    measured_at: float = 0.0
    requested_at: float | None = None  # its last RequestPush that was granted
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACES_KEPT))
    counts: dict[str, int] = field(default_factory=lambda: {"accepted": 0, "gated": 0, "skipped": 0, "undone": 0})
    tokens: dict[str, int] = field(default_factory=lambda: {"accepted": 0, "gated": 0, "lost": 0, "undone": 0})

    @property
    def live(self) -> bool:
        return self.state is not ClusterState.GONE

    @property
    def push_interval_s(self) -> float | None:
        """Median seconds between two pushes; None before the second."""
        return median(self.paces) if self.paces else None

    @property
    def settled_tokens(self) -> int:
        """Tokens that rounds have settled, over all its incarnations."""
        return self.tokens["accepted"] + self.tokens["gated"] + self.tokens["undone"]

    def set_state(self, state: ClusterState, cause: ClusterCause, reason: str, now: float) -> None:
        """Enter a state, or stay in it for another reason."""
        if (state, cause) != (self.state, self.cause):
            self.since = now
        if state != self.state:
            self.state = check_move(CLUSTER_MOVES, self.state, state, f"cluster {self.name}")
        self.cause, self.reason = cause, reason

    def begin_incarnation(self, inc: int, nonce: str, now: float) -> None:
        """Start anew under the same name: counters stay, everything that moves is gone."""
        self.inc, self.nonce = inc, nonce
        self.state, self.cause, self.reason, self.since = ClusterState.JOINING, ClusterCause.JOINED, "joined", now
        self.seq_high, self.base, self.moving = 0, None, True
        self.consumed = self.lost = self.settled = self.settled_steps = 0
        self.told = None
        self.keys = ()
        self.push = self.pull = self.outcome = self.outcome_version = self.requested_at = None
        self.dropped_push = self.closed_pull = Tombstone()


@dataclass
class Round:
    """One attempt at an outer step."""

    number: int
    state: RoundState
    reason: str
    opened: float
    closes: float
    window_s: float = 0.0  # its length before anything made it longer
    queue: deque[Push] = field(default_factory=deque)  # committed, to be measured in this order
    current: Push | None = None  # being measured or folded
    folded: list[Push] = field(default_factory=list)
    gated: list[Push] = field(default_factory=list)
    held: list[Push] = field(default_factory=list)  # wait in their slots for the others to be folded
    flagged: bool = False  # some push of it does not count in some layer
    acc_sq: tuple[float, ...] = ()  # Σ acc² of each layer, after the last fold
    step: OuterStep = NO_STEP  # as its Apply named it; `dips set` may change options meanwhile
    delta_norm: float = 0.0
    clipped: bool = False
    theta_digest: int = 0  # of θ′, once it is applied
    step_norm: float = 0.0  # how far θ′ is from θ, summed over layers; 0: unknown

    @property
    def pushes(self) -> list[Push]:
        return [*self.folded, *self.gated, *([self.current] if self.current else ()), *self.queue, *self.held]

    @property
    def count(self) -> int:
        """How many pushes it has."""
        return len(self.folded) + len(self.gated) + len(self.queue) + len(self.held) + (self.current is not None)


@dataclass
class Fanout:
    """One order given to several slaves; complete when all have answered."""

    kind: FanoutKind
    subject: Subject
    waiting: dict[str, int] = field(default_factory=dict)  # slave that has not answered → number of its order
    first: int = 0  # the number of its first order: its name in the order book
    unanswered: int = 0  # its orders that are in the order book
    answers: dict[str, Answer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeAdmission:
    """The key of a cluster's last probe, and the order that tells it to the slaves."""

    key: str
    fanout: Fanout


@dataclass
class Durability:
    """How the run stands with its disks."""

    state: DurabilityState = DurabilityState.DURABLE
    reason: str = ""
    failures: int = 0  # snapshots in a row that failed on some slave
    late: Fanout | None = None  # the head's snapshot, being written after its commit
    late_failed: tuple[str, ...] = ()  # why it failed, by slave, while others still write
    again_at: float = 0.0  # the head's snapshot failed: not tried again before
