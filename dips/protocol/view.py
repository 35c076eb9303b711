"""The view of a run: its state as frozen records, one for the run and one for each of its peers.

`build_view` fills in what the Coordinator knows. The master adds what it hears and does, and judges each peer
(dips/view/judging.py); then `dips status`, the page and Prometheus draw the same record, each in its own form, and
nothing is judged twice. A decision never depends on it, and nothing here may depend on a sentence: `reason` says to a
person what `cause` says to code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from dips.ids import VersionId
from dips.printable import join_some
from dips.protocol import enums, seeding
from dips.protocol.durability import measure_lag
from dips.protocol.entities import Cluster, Slave
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat, Transfer
from dips.protocol.operator import find_holdouts
from dips.protocol.options import Targets
from dips.protocol.releases import PROTOCOL
from dips.protocol.run_state import RunState, in_order

UNDONE_SHOWN = 8  # the newest; `dips history` knows all


@dataclass(frozen=True, slots=True)
class LastOutcome:
    """How a cluster's last push ended."""

    kind: enums.OutcomeKind
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One cluster. `word`, `severity` and `why` are what is shown of it: see dips/view/judging.py."""

    state: enums.ClusterState
    cause: enums.ClusterCause = enums.ClusterCause.TRAINS
    reason: str = ""
    since_s: float = 0.0  # in this state for this cause
    inc: int = 0
    reads: bool = False  # it only pulls
    base: str | None = None
    staleness: int | None = None  # of one that trains
    pace: str = ""  # when it pushes next, if clusters push together
    pace_s: float | None = None  # median time between two pushes
    last_push_steps: int | None = None
    bandwidth_bytes_per_s: float | None = None  # usual
    accepted: int = 0
    gated: int = 0
    skipped: int = 0
    tokens_accepted: int = 0
    tokens_gated: int = 0
    tokens_lost: int = 0
    tokens_undone: int = 0
    undone: int = 0  # contributions accepted by versions that were rolled back
    claims_refused: int = 0
    norm: float | None = None
    score: float = 0.0
    quarantined: bool = False
    quarantine: str = ""  # by an operator, who gave this reason
    differs: Mapping[str, str] = field(default_factory=dict)  # flagged, not gated: a sentence for each difference
    last: LastOutcome | None = None
    heartbeat: ClusterHeartbeat | None = None  # the newest
    heard_s: float | None = None  # since it came
    word: str = ""
    severity: enums.Severity = enums.Severity.PLAIN
    why: str = ""  # empty: the word says it all

    @property
    def live(self) -> bool:
        return self.state is not enums.ClusterState.GONE

    @property
    def trains(self) -> bool:
        """Whether it is here and may push."""
        return self.live and not self.reads

    @property
    def accepted_ever(self) -> int:
        """Contributions accepted, those of versions that were rolled back included."""
        return self.accepted + self.undone

    @property
    def tokens_accepted_ever(self) -> int:
        """Tokens accepted, likewise."""
        return self.tokens_accepted + self.tokens_undone

    @property
    def loss(self) -> float | None:
        """The loss of its last inner step; None: not known, or not finite."""
        return self.heartbeat.loss if self.heartbeat is not None and isfinite(self.heartbeat.loss) else None

    @property
    def remarks(self) -> tuple[str, ...]:
        """The remarks of its agent."""
        return () if self.heartbeat is None else tuple(r.text for r in self.heartbeat.remarks)

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of its present or last push, of pulls before it; else its usual one."""
        return (self.heartbeat.bytes_per_s if self.heartbeat else None) or self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class MirrorView:
    """How far a mirror lags; what is not in it is lost with the disk that it mirrors."""

    version: str | None = None
    behind_versions: int = 0
    behind_s: float = 0.0
    failing: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SlaveView:
    """One slave, likewise."""

    state: enums.SlaveState
    cause: enums.SlaveCause = enums.SlaveCause.SERVES
    reason: str = ""
    since_s: float = 0.0
    sinc: int = 0
    address: str = ""
    lanes: tuple[str, ...] = ()
    key: str = ""
    version: str | None = None
    slots: int = 0
    slots_used: int = 0
    mirror: MirrorView | None = None
    heartbeat: SlaveHeartbeat | None = None
    heard_s: float | None = None
    word: str = ""
    severity: enums.Severity = enums.Severity.PLAIN
    why: str = ""

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The pushes and pulls that move at it; none at a slave that is lost, whose last heartbeat is kept."""
        return () if self.heartbeat is None or self.state is enums.SlaveState.LOST else self.heartbeat.transfers


@dataclass(frozen=True, slots=True)
class Concern:
    """One thing that an operator should look at."""

    severity: enums.Severity
    who: str
    what: str


@dataclass(frozen=True, slots=True)
class ProgressView:
    tokens: int = 0
    tokens_target: int = 0  # 0: none


@dataclass(frozen=True, slots=True)
class RoundView:
    state: enums.RoundState = enums.RoundState.IDLE
    round: int | None = None
    reason: str = ""
    pushes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """How rounds have ended, in the run."""

    applied: int = 0
    unchanged: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class MetView:
    """The number of the newest versions that have a push of every cluster that was there."""

    all: int = 0
    versions: int = 0


@dataclass(frozen=True, slots=True)
class DurabilityView:
    mode: enums.DurabilityMode = enums.DurabilityMode.COMMIT
    state: enums.DurabilityState = enums.DurabilityState.DURABLE
    reason: str = ""
    head: bool = False  # the head lies on every disk

    @property
    def red(self) -> bool:
        return self.state is not enums.DurabilityState.DURABLE


@dataclass(frozen=True, slots=True)
class RollbackView:
    """A rollback that waits for an operator; 0 steps: none does."""

    steps: int = 0
    reason: str = ""

    @property
    def red(self) -> bool:
        return self.steps > 0


@dataclass(frozen=True, slots=True)
class RangesView:
    total: int = 0
    free: int = 0
    leased: int = 0
    settled: int = 0
    undone: int = 0


@dataclass(frozen=True, slots=True)
class LedgerMirrorView:
    red: bool = False
    behind_transactions: int = 0
    behind_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StandbyView:
    """A second master that waits."""

    name: str = ""
    ready: bool = False
    reason: str = ""
    heard_s: float = 0.0
    protocol: int = 1  # the newest that it speaks; one of the first release says nothing of it


@dataclass(frozen=True, slots=True)
class LeaseView:
    """The lease of the master that serves, in its mirror."""

    holder: str = ""
    claimable: bool = False  # a standby takes over when it is not renewed
    age_s: float | None = None
    failing: bool = False  # it could not be renewed
    reason: str = ""
    standbys: tuple[StandbyView, ...] = ()

    @property
    def present(self) -> int:
        return len(self.standbys)

    @property
    def ready(self) -> int:
        """Return how many standbys would take over now."""
        return sum(standby.ready for standby in self.standbys) if self.claimable else 0

    def find_holdouts(self, protocol: int) -> tuple[str, ...]:
        """Name the standbys that could not serve a run of this protocol."""
        return tuple(f"standby {standby.name}" for standby in self.standbys if standby.protocol < protocol)


@dataclass(frozen=True, slots=True)
class VersionProcessView:
    """`master.on_version`: what runs, and how the last one ended."""

    every: int = 1
    running: str | None = None
    running_s: float | None = None
    version: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    red: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TrackView:
    to: tuple[str, ...] = ()
    red: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JournalView:
    writing: bool = True
    bytes: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class NewestView:
    """The newest version, by its row in the ledger; times are Unix seconds, None if there is none yet."""

    committed: float | None = None
    durable: float | None = None  # time of commit of the newest durable version
    clusters: int = 0  # number of clusters that contributed
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class RunView:
    """The whole. A run that has no ledger yet has a name, and what it waits for."""

    run: str = ""
    waiting: str = ""
    term: int = 0
    uptime_s: float = 0.0  # of this master
    head: str = str(VersionId(0, 0))
    progress: ProgressView = ProgressView()
    targets: Targets = Targets()
    protocol: int = 1  # that the run speaks; a master of the first release says nothing of it
    protocol_newest: int = 1  # that its master speaks
    holdouts: tuple[str, ...] = ()  # who is not known to speak that
    tuned: Mapping[str, float | None] = field(default_factory=dict)  # by `dips set`; null: off
    untuned: tuple[str, ...] = ()  # what the ledger has tuned and this master cannot
    finished: str | None = None
    round: RoundView = RoundView()
    rounds: RoundCounts = RoundCounts()
    met: MetView = MetView()
    durability: DurabilityView = DurabilityView()
    rollback: RollbackView = RollbackView()
    undone: tuple[str, ...] = ()  # versions that were rolled back, the newest
    undone_total: int = 0
    clusters: Mapping[str, ClusterView] = field(default_factory=dict)
    slaves: Mapping[str, SlaveView] = field(default_factory=dict)
    ranges: RangesView = RangesView()
    # From here on by the master, around the Coordinator.
    pace_warning: str = ""  # why clusters that should push together cannot
    newest: NewestView = NewestView()
    ledger_mirror: LedgerMirrorView | None = None
    lease: LeaseView | None = None
    on_version: VersionProcessView | None = None
    track: TrackView | None = None
    journal: JournalView | None = None
    page: str | None = None  # where a browser finds it
    shared: Mapping[str, Any] = field(default_factory=dict)  # the agreed options, while there is no ledger
    concerns: tuple[Concern, ...] = ()  # what asks for a look, the gravest first; peers' are in their rows, too

    @property
    def is_finished(self) -> bool:
        return self.finished is not None

    @property
    def head_version(self) -> VersionId:
        return VersionId.parse(self.head)


def build_view(run: RunState, now: float) -> RunView:
    """Return the view of the run as the Coordinator knows it."""
    r, differences = run.round, run.penalty.find_differences()
    return RunView(
        run=run.row.run,
        term=run.term,
        uptime_s=now - run.started,
        head=str(run.head),
        progress=ProgressView(run.tokens_accepted, run.targets.tokens),
        targets=run.targets,
        protocol=run.protocol,
        protocol_newest=PROTOCOL,
        holdouts=tuple(find_holdouts(run, PROTOCOL)) if run.protocol < PROTOCOL else (),
        tuned={key: None if change.off else change.value for key, change in run.tuned.items()},
        untuned=tuple(run.refused_changes.values()),
        finished=str(run.finished) if run.finished else None,
        round=RoundView(r.state, r.number, run.describe_round(r), tuple(str(p.id) for p in r.pushes))
        if r
        else RoundView(reason=_why_idle(run)),
        rounds=RoundCounts(**run.counts),
        met=MetView(sum(pushes >= here for pushes, here in run.met), len(run.met)),
        durability=DurabilityView(
            run.options.durability, run.durability.state, run.durability.reason, run.versions[run.head].durable
        ),
        rollback=RollbackView(run.rollback_steps, run.rollback_waits),
        undone=tuple(str(v) for v in run.undone)[-UNDONE_SHOWN:],
        undone_total=len(run.undone),
        clusters={c.name: _view_cluster(run, c, now, differences.get(c.name, {})) for c in run.clusters.values()},
        slaves={s.name: _view_slave(run, s, now) for s in run.slaves.values()},
        ranges=RangesView(
            run.ranges.total, run.ranges.free, run.ranges.leased, run.ranges.settled.count, len(run.ranges.undone)
        ),
    )


def explain_unready(run: RunState) -> str:
    """Why the run cannot take an outer step now, whatever clusters do; empty: it can."""
    if not run.is_proven:
        away = join_some([s.name for s in in_order(run.slaves, run.roster.unregistered)])
        return f"not yet registered: {away}"
    return run.why_missing() or run.why_held()


def _why_idle(run: RunState) -> str:
    if run.finished:
        return f"the run is finished at {run.finished}"
    if run.durability.state is enums.DurabilityState.STOPPED:
        return run.durability.reason
    missing = run.slaves_missing()
    if unseeded := seeding.explain_unseeded(run):
        return unseeded
    if missing and run.rollback_waits:
        return run.rollback_waits
    if missing:
        return "waits for " + ", ".join(f"{s.name} ({s.state})" for s in missing)
    return "the slaves are flipping" if run.flipping is not None else "waits for the first push"


def _view_cluster(run: RunState, c: Cluster, now: float, differs: Mapping[enums.Difference, str]) -> ClusterView:
    statistics = run.penalty.penalty_row(c.name)
    return ClusterView(
        state=c.state,
        cause=c.cause,
        reason=c.reason,
        since_s=now - c.since,
        inc=c.inc,
        reads=c.reads,
        base=str(c.base) if c.base else None,
        staleness=None if c.reads else run.staleness_of(c.base),
        pace_s=c.push_interval_s,
        last_push_steps=c.last_outcome.inner_steps if c.last_outcome else None,
        bandwidth_bytes_per_s=c.bytes_per_s,
        accepted=c.counts["accepted"],
        gated=c.counts["gated"],
        skipped=c.counts["skipped"],
        tokens_accepted=c.tokens["accepted"],
        tokens_gated=c.tokens["gated"],
        tokens_lost=c.tokens["lost"],
        tokens_undone=c.tokens["undone"],
        undone=c.counts["undone"],
        claims_refused=c.claims_refused,
        norm=statistics.last_norm,
        score=c.last_outcome.score if c.last_outcome else 0.0,
        quarantined=statistics.quarantined or c.name in run.quarantined,
        quarantine=run.quarantined.get(c.name, ""),
        differs={by.value: said for by, said in differs.items()},
        last=LastOutcome(c.last_outcome.kind, c.last_outcome.reason) if c.last_outcome else None,
    )


def _view_slave(run: RunState, s: Slave, now: float) -> SlaveView:
    lag = measure_lag(run, s, now)
    return SlaveView(
        state=s.state,
        cause=s.cause,
        reason=s.reason,
        since_s=now - s.since,
        sinc=s.sinc,
        address=s.address,
        lanes=tuple(s.lanes),
        key=s.key,
        version=str(s.memory) if s.memory else None,
        slots=s.slots,
        slots_used=len(run.transfers.pushes),
        mirror=None if s.mirror is None else MirrorView(*lag, failing=bool(s.mirror.reason), reason=s.mirror.reason),
    )
