"""Everything that the agent remembers; no decision is made here.

Three dataclasses say how the cluster stands with the master (Membership), what its trainer does (TrainerAttempt) and
how far the present push or pull is (OuterSync). Beside them stand what was earned (Account), the data ranges
(RangeQueue, RangeRequests), when to push (Pace), where the time goes (Tally) and what the master is being asked
(OpenQuestion). The functions over it stand in modules by subject; core.py calls them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import field
from math import inf
from random import Random

from dips.client.agent.account import NO_INCARNATION, Account, PastIncarnation, RangeQueue
from dips.client.agent.actions import Action, Channel, RecordMark, StopTrainer
from dips.client.agent.pace import Pace
from dips.client.agent.phases import SyncPhase
from dips.client.agent.tally import Tally
from dips.client.ipc.messages import Answer, ErrorReply, PushResult
from dips.dataclass import dataclass
from dips.errors import DipsError, treatment_of
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, Progress
from dips.protocol.enums import DivergencePolicy, RemarkSubject
from dips.transport.backoff import Backoff

RANGES_AT_ONCE = 2  # leased together: the one needed, and one so that the next is here before it is asked for
RESTART_WINDOW_S = 86_400.0  # in which restarts are counted: a month on 1,000 devices crashes more than ten times
PATIENCE_HEARTBEATS = 5  # a trainer waits so long for a master that does not answer, then trains on


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """Who this cluster is, and what it must agree on with the run."""

    run: str
    cluster: str
    config_digest: str


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent is started with."""

    identity: ClusterIdentity
    heartbeat_s: float
    retry_s: float  # the longest pause before a master that did not answer is asked again
    overlap: bool = False  # the trainer trains on while its push moves, its window is open and its pull arrives
    max_restarts: int = 0  # of the training command, after it crashed, within `restart_window_s`
    ranges_at_once: int = RANGES_AT_ONCE
    restart_window_s: float = RESTART_WINDOW_S
    take_over: bool = False  # fence an incarnation of another agent, if one lives
    on_divergence: DivergencePolicy = DivergencePolicy.RESET  # of the model
    fragments: int = 1  # in which the ranks stagger what they move beside training

    @property
    def patience_s(self) -> float:
        """How long a trainer waits for a master that does not answer, before it trains on."""
        return PATIENCE_HEARTBEATS * self.heartbeat_s


@dataclass
class Membership:
    """This cluster in the run, as its master counts, and what the master last said of the run."""

    inc: int = 0  # 0: never joined
    nonce: str = ""  # of the last Join
    manifest_digest: str = ""  # of the model that was joined with
    frozen_digest: str = ""  # of its frozen parameters
    wants_manifest: bool = False  # the master does: the model is not the run's
    term: int = 0
    progress: Progress = Progress(0, 0, None)
    settled: int = 0  # pushes of this cluster that were accepted or gated, in all its incarnations
    former: PastIncarnation = NO_INCARNATION  # the incarnation before, until the master reports what it has of it
    unreachable_since: float | None = None
    times_taken: int = 0  # Joins in a row that were refused, since another agent bears the name


@dataclass(frozen=True, slots=True)
class Crash:
    """One end of the training command that was not wanted."""

    at: float
    code: int
    last_line: str  # of its standard error, cut
    stepped: bool  # this agent's trainer had taken an inner step


@dataclass
class TrainerAttempt:
    """The present or last attempt of the training job, and what all attempts under this agent have done."""

    attempt: int = 0
    alive: bool = False
    process: str = ""  # rank 0
    former_processes: set[str] = field(default_factory=set)  # rank 0 of former attempts
    launch: int = 0  # the newest start of the training command that has attached
    push_ranks: int = 1
    pull_ranks: int = 1
    keys: tuple[str, ...] = ()  # public, of the ranks that move bytes
    base: VersionId | None = None  # the version that it trains on; None: no parameters of the run, or torn ones
    must_pull: bool = False  # it trained under a former incarnation: a pull will overwrite that work
    attached: bool = False  # it was told so
    starved: bool = False  # it waits for a data range
    detached: bool = False  # it ended the outer loop itself
    inner_steps: int = 0  # since the agent's start, as are tokens and loss
    tokens: int = 0
    loss: float | None = None  # of the last step that gave one
    loss_not_finite: bool = False  # since the last freeze, and that was recorded
    marked_at: float = 0.0  # when the timeline last got inner steps
    steps_before: int = 0  # inner_steps when this attempt began
    idle_since: float = 0.0  # it could have taken a step since then, and has taken none
    accepted_pushes: int = 0  # since the agent's start
    resets: int = 0  # of a model that was not finite, since the last push whose model was


@dataclass
class OuterSync:
    """The present push or pull, and what rank 0 is to be answered."""

    phase: SyncPhase = SyncPhase.UNJOINED
    reason: str = "no trainer has attached yet"
    seq: int = 0  # of the last push or pull in this incarnation
    accepted_seq: int = 0  # of the last push in this incarnation that was accepted
    result: PushResult | None = None  # of the newest push that was settled, for the ranks
    # rank 0's question
    question: int = 0  # its number
    waiting: bool = False  # for the verdict
    verdict: Answer | None = None  # given again when the question is repeated
    waits_since: float = 0.0  # when it was first asked
    # the transfer
    grant: Grant | None = None
    frozen: bool = False  # the ranks have the order to freeze the model for the present push
    frozen_by: int = 0  # the attempt whose progress the open push carries
    merge: bool = False  # the present pull keeps what was trained since the push was frozen
    ordered: PushId | PullId | None = None  # what the ranks were told to move last
    moved: tuple[int, int] = (0, 0)  # of the present or last transfer: bytes, in all
    moved_at: float = 0.0  # when that was told
    moving_s: float = 0.0  # in which it moved
    bytes_per_s: float = 0.0  # its mean rate
    moving_at_heartbeat: PushId | PullId | None = None  # what was moving when the last heartbeat left
    halt: str = ""  # why the ranks should end the present transfer
    # what comes next
    pull_due: bool = False
    final_pull_tried: bool = False
    pull_failures: int = 0  # in a row
    backoff_until: float = 0.0  # no push is asked for before
    place: int = 0  # in the master's queue for a slot, as last told; 0: it does not wait there


@dataclass
class RangeRequests:
    """What the master was asked about data ranges, beside the question that is out."""

    seq: int = 0  # of the last question in this incarnation
    claimed: tuple[int, ...] = ()  # ranges of a checkpoint that were asked for
    waits: str = ""  # for whom the master has us wait
    ended_at: float | None = None  # when the data ended before all of it was settled
    rest_again_at: float = 0.0  # the next try to push the rest
    by_step: bool = False  # the trainer says with each inner step how far it has trained its ranges
    recalls: int = 0  # how often ranges were taken back from the present trainer, which lives


@dataclass
class OpenQuestion:
    """A question that the master has not answered."""

    number: int
    event: object
    backoff: Backoff
    pausing: bool = False  # it could not be reached: the question is repeated after a pause


@dataclass
class HeartbeatTimer:
    """One heartbeat is out at a time."""

    due_at: float = 0.0
    in_flight: bool = False
    refused_since: float | None = None  # the first refusal (Denied) since an answer came

    def next_deadline(self) -> float:
        return inf if self.in_flight else self.due_at

    def is_due(self, now: float) -> bool:
        return not self.in_flight and now >= self.due_at


@dataclass
class AgentState:
    """One agent from its start to its end; `now` is the time of the event that is being handled."""

    settings: AgentSettings
    pace: Pace
    new_nonce: Callable[[], str]
    rng: Random  # jitter of pauses
    membership: Membership = field(default_factory=Membership)
    trainer: TrainerAttempt = field(default_factory=TrainerAttempt)
    sync: OuterSync = field(default_factory=OuterSync)
    account: Account = field(default_factory=Account)
    ranges: RangeQueue = field(default_factory=RangeQueue)
    range_requests: RangeRequests = field(default_factory=RangeRequests)
    heartbeats: HeartbeatTimer = field(default_factory=HeartbeatTimer)
    tally: Tally = field(default_factory=Tally)
    questions: dict[Channel, OpenQuestion] = field(default_factory=dict)
    questions_asked: int = 0
    crashes: deque[Crash] = field(default_factory=deque)  # of the training command, within the window
    remarks: dict[RemarkSubject, str] = field(default_factory=dict)  # what a person should know now: remarks.py
    waits_for: tuple[str, float, bool] = ("", 0.0, False)  # why nothing goes on, since when, whether that was logged
    leaves_for: str = ""  # why the agent ends, for the master
    failure: ErrorReply | None = None  # why this agent cannot go on, for the ranks
    stop: StopTrainer | None = None  # the first reason why it cannot go on
    now: float = 0.0
    out: list[Action] = field(default_factory=list)

    @property
    def cluster(self) -> str:
        return self.settings.identity.cluster

    @property
    def joined(self) -> bool:
        """The cluster has an incarnation at the master, and has not begun to join as another."""
        return self.membership.inc > 0 and self.sync.phase is not SyncPhase.JOINING

    @property
    def fraction(self) -> float:
        """Accepted tokens of the run over its target, 0 to 1; 0 if it has none."""
        p = self.membership.progress
        return min(1.0, p.tokens / p.tokens_target) if p.tokens_target else 0.0

    @property
    def trains_on(self) -> bool:
        """Whatever it waits for, the trainer does not stand still: it overlaps, and has parameters to train."""
        return self.settings.overlap and self.trainer.base is not None and not self.trainer.must_pull

    @property
    def push_id(self) -> PushId:
        return PushId(self.cluster, self.membership.inc, self.sync.seq)

    @property
    def pull_id(self) -> PullId:
        return PullId(self.cluster, self.membership.inc, self.sync.seq)

    def record_mark(self, kind: str, **fields: object) -> None:
        """Record an event of the timeline."""
        self.out.append(RecordMark(kind, fields))

    def fail_training(self, error: DipsError) -> None:
        """End trainer and agent: going on cannot help."""
        self.failure = ErrorReply(type(error).__name__, str(error))
        self.end_training(StopTrainer(treatment_of(error).exit_code, f"{type(error).__name__}: {error}", type(error)))

    def end_training(self, stop: StopTrainer) -> None:
        """The first reason to stop is the agent's exit code."""
        self.stop = self.stop or stop
        self.out.append(stop)

    def update_progress(self, progress: Progress) -> None:
        """Answers overtake each other: progress never goes back."""
        if progress.tokens >= self.membership.progress.tokens or progress.finished:
            self.membership.progress = progress
