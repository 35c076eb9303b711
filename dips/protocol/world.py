"""Everything that the Coordinator knows, and the few verbs by which its parts say what is to be done.

One owner: only `Coordinator.step` lets the functions of slaves.py, clusters.py, pushes.py, pulls.py and round.py change
it. `now` is the time of the present step; `out` collects the step's effects in their order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median

from dips.ids import PullId, PushId, VersionId
from dips.protocol.data import RangeBook
from dips.protocol.deadlines import transfer_deadline_s
from dips.protocol.effects import Effect, Failed, Grant, Note, Order, OrderBody, Progress, Reply, Result, SlaveAddress
from dips.protocol.events import Answer
from dips.protocol.manifest import BYTES_PER_PARAMETER, Manifest
from dips.protocol.moves import CLUSTER_MOVES, SLAVE_MOVES, ClusterState, RoundState, SlaveState, move
from dips.protocol.options import Options
from dips.protocol.order import walk
from dips.protocol.penalty import Penalty, Verdict
from dips.protocol.records import LedgerState, OutcomeRow, Record, VersionRow

OLD_LEDGER = "this ledger is an old copy: put the newest one back, or see `dips-master recover`"
LINEAGE_KEPT = 1_000  # newest versions; a base older than they are counts as no ancestor: its staleness is unknown
PACES_KEPT = 16  # times between pushes of a cluster, for the window's default and for who is expected


@dataclass
class Slave:
    """One holder of layers; the placement names it, a Register gives it a life."""

    name: str
    layers: tuple[int, ...]
    sinc: int = 0
    nonce: str = ""
    state: SlaveState = SlaveState.STARTING
    reason: str = "not registered since this master started"
    address: str = ""
    lanes: tuple[str, ...] = ()
    key: str = ""
    slots: int = 0
    memory: VersionId | None = None
    offer: frozenset[VersionId] | None = None  # what it said it can serve; None: not said since that changed
    deaf: int = 0  # orders in a row past their deadline
    draining: bool = False  # an operator wants it out of service when nothing is open on it
    registered: bool = False  # in this life of the master
    garbage: tuple[VersionId, ...] = ()  # on its disk and in no row: deleted when this ledger is proven
    must_hear: bool = False  # it was lost as deaf: READY again only after it has answered a Ping

    def become(self, state: SlaveState, reason: str) -> None:
        if state != self.state:
            self.state = move(SLAVE_MOVES, self.state, state, f"slave {self.name}")
        self.reason = reason


@dataclass
class Push:
    """One push from OpenPush to its Outcome."""

    id: PushId
    base: VersionId
    ranks: int
    deadline: float
    deadline_s: float
    due: float = 0.0  # when it should be here, by its cluster's bandwidth; 0 while that is unknown
    codec: str = "fp32"
    opened: bool = False
    staged: set[str] = field(default_factory=set)
    committed: bool = False
    tokens: int = 0
    inner_steps: int = 0
    ranges: tuple[int, ...] = ()
    loss: float = 0.0
    verdict: Verdict | None = None
    weight: float = 0.0


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
class Cluster:
    """One training cluster in its present life."""

    name: str
    inc: int
    nonce: str
    state: ClusterState = ClusterState.JOINING
    reason: str = "joined"
    seq_high: int = 0  # the highest seq of a push or pull in this life
    base: VersionId | None = None
    ranks: int = 1
    moving: bool = True  # its inner steps are seen moving
    consumed: int = 0  # tokens of this life in all, as last told by the judge
    lost: int = 0  # of those, with dead trainers
    settled: int = 0  # tokens of this life that were accepted or gated
    accounted: int = 0  # tokens of the newest life that is over: settled, lost, or with its last push
    push: Push | None = None
    pull: Pull | None = None
    dropped_push: tuple[int, str] = (0, "")  # (seq, reason) of the last that was dropped
    closed_pull: tuple[int, str] = (0, "")  # (seq, reason) of the last that was closed
    outcome: OutcomeRow | None = None
    outcome_version: VersionId | None = None
    bytes_per_s: float | None = None  # of its transfers, by its beats; stays over its lives: it is its link's
    measured_at: float = 0.0
    requested_at: float | None = None  # its last RequestPush that was granted
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACES_KEPT))
    counts: dict[str, int] = field(default_factory=lambda: {"accepted": 0, "gated": 0, "skipped": 0, "undone": 0})
    tokens: dict[str, int] = field(default_factory=lambda: {"accepted": 0, "gated": 0, "lost": 0, "undone": 0})

    @property
    def live(self) -> bool:
        return self.state is not ClusterState.GONE

    @property
    def pace(self) -> float | None:
        """Median seconds between two pushes; None before the second."""
        return median(self.paces) if self.paces else None

    @property
    def counted(self) -> int:
        """Tokens that rounds have settled, over all its lives."""
        return self.tokens["accepted"] + self.tokens["gated"] + self.tokens["undone"]

    def become(self, state: ClusterState, reason: str) -> None:
        if state != self.state:
            self.state = move(CLUSTER_MOVES, self.state, state, f"cluster {self.name}")
        self.reason = reason

    def reborn(self, inc: int, nonce: str) -> None:
        """A new life under the same name: counters stay, everything that moves is gone."""
        self.inc, self.nonce = inc, nonce
        self.state, self.reason = ClusterState.JOINING, "joined"
        self.seq_high, self.base, self.moving = 0, None, True
        self.consumed = self.lost = self.settled = 0
        self.push = self.pull = self.outcome = self.outcome_version = self.requested_at = None
        self.dropped_push = self.closed_pull = (0, "")


@dataclass
class Round:
    """One attempt at an outer step."""

    number: int
    state: RoundState
    reason: str
    opened: float
    closes: float
    queue: list[Push] = field(default_factory=list)  # committed, to be measured in this order
    current: Push | None = None  # being measured or folded
    folded: list[Push] = field(default_factory=list)
    gated: list[Push] = field(default_factory=list)
    acc_sq: float = 0.0  # Σ over slaves of Σ acc² after the last fold
    scale: float = 0.0
    delta_norm: float = 0.0
    clipped: bool = False

    @property
    def unfolded(self) -> list[Push]:
        """Committed, and still in their slots: the one being measured or folded, and those after it."""
        return [self.current, *self.queue] if self.current else list(self.queue)

    @property
    def pushes(self) -> list[Push]:
        return [*self.folded, *self.gated, *self.unfolded]


@dataclass
class Chorus:
    """One order given to several slaves; complete when all have answered."""

    kind: str  # whose continuation it is: see coordinator.CONTINUE
    subject: PushId | PullId | int | VersionId
    waiting: set[str]
    answers: dict[str, Answer] = field(default_factory=dict)


@dataclass
class Durability:
    """How the run stands with its disks; `state` with its reason, as everything."""

    state: str  # "durable" | "degraded": versions are announced without a snapshot | "stopped": no more rounds
    reason: str = ""
    failures: int = 0  # snapshots in a row that failed on some slave
    late: Chorus | None = None  # the head's snapshot, being written after its commit
    late_failed: tuple[str, ...] = ()  # why it failed, by slave, while others still write
    again_at: float = 0.0  # the head's snapshot failed: not tried again before


class World:
    """The state of the whole run as the master sees it."""

    def __init__(self, state: LedgerState, manifest: Manifest, options: Options, now: float) -> None:
        self.row, self.manifest, self.options, self.term = state.row, manifest, options, state.term
        self.now = self.started = now
        self.out: list[Effect] = []
        self.slaves = {name: Slave(name, layers) for name, layers in state.row.placement}
        for peer in state.slaves:
            if peer.name in self.slaves:
                self.slaves[peer.name].sinc, self.slaves[peer.name].nonce = peer.inc, peer.nonce
        self.clusters = {
            peer.name: Cluster(
                peer.name, peer.inc, peer.nonce, settled=peer.tokens_settled, accounted=peer.tokens_accounted
            )
            for peer in state.clusters
        }
        for peer in state.clusters:
            cluster = self.clusters[peer.name]
            cluster.state = ClusterState.GONE if peer.ended else ClusterState.TRAINING
            cluster.reason = "its life ended" if peer.ended else "known from the ledger"
        self._restore_outcomes(state)
        self._restore_totals(state)
        self.versions: dict[VersionId, VersionRow] = {  # the lineage, in order
            v.version: replace(v, shares=()) if v.retired else v for v in state.versions
        }
        self.forget_old_versions()
        self.undone: dict[VersionId, VersionRow] = {v.version: v for v in state.undone}
        self.head = state.versions[-1].version
        self.next_round = state.next_round
        self.tokens_accepted = sum(v.tokens for v in state.versions)  # by the lineage
        self.finished = state.finished
        requeue = options.requeue == "undone"
        self.ranges = RangeBook(options.data, state.settled, state.leased, state.undone_ranges, requeue)
        genesis_norm = sum(state.row.genesis_norms)
        self.penalty = Penalty(options.penalty, state.penalty, state.history, genesis_norm)
        self.round: Round | None = None
        self.opened_at: float | None = None  # when the last window opened
        self.waiting: list[Push] = []  # committed while no window was open to them
        self.flipping: Chorus | None = None
        self.durability = Durability("durable")
        self.rollback_waits = ""  # for whom, while some slave cannot offer the head
        self.closed_at = now  # when the last window closed
        self.update_s = 0.0  # from there to the last flip; 0 if the round left θ as it was
        self.counts = {"applied": 0, "unchanged": 0, "skipped": 0, **dict(state.rounds)}
        self.choruses: dict[int, tuple[Chorus, Order]] = {}  # unanswered orders by number
        self.last_number = 0

    def forget_old_versions(self) -> None:
        """Bound the lineage: v0@r0, the newest LINEAGE_KEPT, and what may still be offered stay. The ledger has all."""
        for version in list(islice(self.versions, 1, max(1, len(self.versions) - LINEAGE_KEPT))):
            if self.versions[version].retired:
                del self.versions[version]

    def _restore_outcomes(self, state: LedgerState) -> None:
        for outcome, version in state.outcomes:
            cluster = self.clusters.get(outcome.push.cluster)
            if cluster and cluster.inc == outcome.push.inc:
                cluster.outcome, cluster.outcome_version = outcome, version
                cluster.seq_high = outcome.push.seq

    def _restore_totals(self, state: LedgerState) -> None:
        for t in state.totals:
            cluster = self.clusters.get(t.cluster)
            if cluster:
                cluster.counts = {
                    "accepted": t.accepted, "gated": t.gated, "skipped": t.skipped, "undone": t.undone,
                }  # fmt: skip
                cluster.tokens = {
                    "accepted": t.tokens_accepted, "gated": t.tokens_gated,
                    "lost": t.tokens_lost, "undone": t.tokens_undone,
                }  # fmt: skip

    # ---- saying what is to be done ----

    def record(self, record: Record) -> None:
        self.out.append(record)

    def reply(self, req: int, result: Result) -> None:
        self.out.append(Reply(req, result))

    def note(self, kind: str, **fields: object) -> None:
        self.out.append(Note(kind, tuple((key, str(value)) for key, value in fields.items())))

    def order(
        self,
        kind: str,
        subject: PushId | PullId | int | VersionId,
        bodies: dict[str, OrderBody],
        deadline_s: float,
    ) -> Chorus:
        """Give each named slave its order; the continuation of `kind` is called when all have answered."""
        chorus = Chorus(kind, subject, set(bodies))
        for name, body in bodies.items():
            self.last_number += 1
            order = Order(name, self.slaves[name].sinc, self.term, self.last_number, body, deadline_s)
            self.choruses[self.last_number] = (chorus, order)
            self.out.append(order)
        return chorus

    def say_otherwise(self, number: int, body: OrderBody) -> None:
        """Give a slave another order in the place of one that it refused; the chorus goes on."""
        chorus, old = self.choruses.pop(number)
        self.last_number += 1
        order = Order(old.slave, self.slaves[old.slave].sinc, self.term, self.last_number, body, old.deadline_s)
        self.choruses[self.last_number] = (chorus, order)
        self.out.append(order)

    def order_all(
        self, kind: str, subject: PushId | PullId | int | VersionId, body: OrderBody, deadline_s: float
    ) -> Chorus:
        """Give every READY slave the same order."""
        return self.order(kind, subject, {s.name: body for s in self.ready_slaves()}, deadline_s)

    def forget_orders(self, kinds: frozenset[str], subject: PushId | PullId | int | VersionId | None = None) -> None:
        """Whatever is answered to these from now on no longer matters."""
        for number, (chorus, _) in list(self.choruses.items()):
            if chorus.kind in kinds and (subject is None or chorus.subject == subject):
                del self.choruses[number]

    # ---- what others ask ----

    def standing(self, name: str, inc: int) -> str:
        """What a life is to this master: "live", "gone" (join again) or "fenced" (a newer life exists: exit)."""
        cluster = self.clusters.get(name)
        if cluster is None or inc > cluster.inc:
            return "gone"
        if inc < cluster.inc:
            return "fenced"
        return "live" if cluster.live else "gone"

    @property
    def proven(self) -> bool:
        """Whether the slaves have been heard that know if this ledger is an old copy (why.md 2, 4).

        All of them, since the one that serves what this ledger lacks may come last; after a lease those that came. A
        first term is no copy's: any one slave does.
        """
        heard = [slave.registered for slave in self.slaves.values()]
        waited = self.term == 1 or self.now - self.started >= self.options.timing.lease_s
        return all(heard) or (waited and any(heard))

    def unproven(self, req: int) -> bool:
        """Whether slaves have yet to register; the asker is told to come again."""
        if self.proven:
            return False
        away = ", ".join(s.name for s in self.slaves.values() if not s.registered)
        self.reply(req, Failed("UnavailableMaster", f"not yet registered: {away}; slaves know if this ledger is old"))
        return True

    def living(self, req: int, name: str, inc: int) -> Cluster | None:
        """Return the cluster if this life of it is live; else answer the question with StaleIncarnation.

        Before the slaves have registered nothing is answered: an old copy of the ledger would call leases foreign and
        lives unknown that are not, and a cluster would end by it.
        """
        if self.unproven(req):
            return None
        stand = self.standing(name, inc)
        if stand == "live":
            return self.clusters[name]
        present = self.clusters[name].inc if name in self.clusters else 0
        self.reply(req, Failed("StaleIncarnation", f"{name}/{inc} is {stand}; the present life is {name}/{present}"))
        return None

    def ready_slaves(self) -> list[Slave]:
        return [s for s in self.slaves.values() if s.state is SlaveState.READY]

    def offers_changed(self) -> None:
        """What slaves said to offer no longer holds: a version is new, or on the disks, or gone from them."""
        for slave in self.slaves.values():
            slave.offer = None

    def slaves_missing(self) -> list[Slave]:
        return [s for s in self.slaves.values() if s.state is not SlaveState.READY]

    def why_missing(self) -> str:
        """Which slaves cannot take anything new, and why; empty if all can."""
        missing = [f"{s.name} ({s.state}: {s.reason})" for s in self.slaves_missing()]
        return ", ".join(missing + [f"{s.name} (it drains)" for s in self.ready_slaves() if s.draining])

    def grant(self, version: VersionId, ranks: int, deadline_s: float, first: int = 0) -> Grant:
        """What a cluster needs to move; `first` ranks of other transfers walk before its own."""
        slaves = tuple(SlaveAddress(s.name, s.sinc, s.lanes, s.layers, s.key) for s in self.slaves.values())
        workers = range(first, first + ranks)
        order = tuple(walk(self.options.order, worker, len(slaves), str(version)) for worker in workers)
        return Grant(version, slaves, order, deadline_s)

    @property
    def model_bytes(self) -> int:
        """What a push or pull moves, at most."""
        return self.manifest.numel * BYTES_PER_PARAMETER

    def transfer_s(self, cluster: Cluster) -> float:
        """How long a push or pull of this cluster may move: the whole model, over its own link."""
        return transfer_deadline_s(self.model_bytes, cluster.bytes_per_s, self.options.timing)

    def moving_s(self, cluster: Cluster) -> float:
        """How long a push of this cluster moves, by our guess; 0 while its bandwidth is unknown."""
        return self.model_bytes / cluster.bytes_per_s if cluster.bytes_per_s else 0.0

    def progress(self) -> Progress:
        return Progress(self.tokens_accepted, self.options.stop.tokens, self.finished)

    def is_ancestor(self, version: VersionId) -> bool:
        return version in self.versions

    def open_pushes(self) -> list[Push]:
        """Pushes that hold a slot on every slave: opening, moving, staged, or committed and not yet folded."""
        held = self.round.unfolded if self.round else []
        return [*self.uncommitted(), *held, *self.waiting]

    def uncommitted(self) -> list[Push]:
        """Pushes that are opening or moving: they die with their cluster, their deadline or a slave."""
        return [c.push for c in self.clusters.values() if c.push and not c.push.committed]

    def cluster_of(self, transfer: object) -> Cluster | None:
        """The cluster whose present push or pull has this name; None if it is over."""
        cluster = self.clusters.get(transfer.cluster) if isinstance(transfer, PushId | PullId) else None
        if cluster is None:
            return None
        present = cluster.push if isinstance(transfer, PushId) else cluster.pull
        return cluster if present and present.id == transfer else None

    def open_pulls(self) -> list[Pull]:
        return [c.pull for c in self.clusters.values() if c.pull]

    def staleness(self, base: VersionId | None) -> int | None:
        """Outer steps that θ has had since `base`; None if it is unknown or no ancestor."""
        return self.head.version - base.version if base and self.is_ancestor(base) else None
