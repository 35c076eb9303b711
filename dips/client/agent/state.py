"""The agent's state; no decision is made here.

Three dataclasses hold the cluster's standing with the master (Membership), its trainer (TrainerAttempt) and the present
push or pull (OuterSync). Further ones hold the progress (Account), the data ranges (RangeQueue, RangeRequests), the
time of the next push (Pace), the use of time (Tally) and the open questions to the master (OpenQuestion). The functions
over them are in modules by subject; core.py calls them.
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

RANGES_AT_ONCE = 2  # ranges leased together: the one needed, and the next, before it is asked for
RESTART_WINDOW_S = 86_400.0  # restarts are counted within it: a month on 1,000 devices has more than ten crashes
PATIENCE_HEARTBEATS = 5  # a trainer waits this many heartbeats for an unreachable master, then trains on


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """The names of run and cluster, and the digest of the options that both must agree on."""

    run: str
    cluster: str
    config_digest: str


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The settings of an agent."""

    identity: ClusterIdentity
    heartbeat_s: float
    retry_s: float  # longest pause before an unreachable master is asked again
    overlap: bool = False  # the trainer trains on while its push moves, its window is open and its pull arrives
    max_restarts: int = 0  # restarts of a crashed training command within `restart_window_s`
    ranges_at_once: int = RANGES_AT_ONCE
    restart_window_s: float = RESTART_WINDOW_S
    take_over: bool = False  # fence a running agent of the same name
    on_divergence: DivergencePolicy = DivergencePolicy.RESET  # if the model is no longer finite
    fragments: int = 1  # number of fragments in which the ranks stagger a transfer beside training

    @property
    def patience_s(self) -> float:
        """The time a trainer waits for an unreachable master before it trains on."""
        return PATIENCE_HEARTBEATS * self.heartbeat_s


@dataclass
class Membership:
    """The cluster's membership in the run, and the run's progress as last reported by the master."""

    inc: int = 0  # 0: never joined
    nonce: str = ""  # nonce of the last Join
    manifest_digest: str = ""  # digest of the manifest that was joined with
    frozen_digest: str = ""  # digest of the model's frozen parameters
    wants_manifest: bool = False  # the master asked for the manifest: the model is not the run's
    term: int = 0
    progress: Progress = Progress(0, 0, None)
    settled: int = 0  # pushes of this cluster that were accepted or gated, in all its incarnations
    former: PastIncarnation = NO_INCARNATION  # the former incarnation, until the master reports its tokens
    unreachable_since: float | None = None  # None: the master answers  # None: the master answers
    times_taken: int = 0  # Joins refused in a row because another agent has the name


@dataclass(frozen=True, slots=True)
class Crash:
    """One unwanted end of the training command."""

    at: float
    code: int
    last_line: str  # last line of its standard error, truncated
    stepped: bool  # a trainer of this agent had taken an inner step before


@dataclass
class TrainerAttempt:
    """The present or last attempt of the training job, and counters over all attempts under this agent."""

    attempt: int = 0
    alive: bool = False
    process: str = ""  # identifies rank 0's process
    former_processes: set[str] = field(default_factory=set)  # rank 0's processes of former attempts
    launch: int = 0  # the newest start of the training command that has attached
    push_ranks: int = 1
    pull_ranks: int = 1
    keys: tuple[str, ...] = ()  # public keys of the ranks that transfer
    base: VersionId | None = None  # the version being trained on; None: no parameters of the run, or torn ones
    must_pull: bool = False  # its work, done under a former incarnation, will be overwritten by a pull
    attached: bool = False  # the trainer got the answer Attached
    starved: bool = False  # the trainer waits for a data range
    detached: bool = False  # the trainer closed the outer loop itself
    inner_steps: int = 0  # since the agent's start, as are tokens and loss
    tokens: int = 0
    loss: float | None = None  # of the last step that reported one; None: none did
    loss_not_finite: bool = False  # a loss since the last freeze was not finite, which was recorded
    marked_at: float = 0.0  # when inner steps were last written to the timeline
    steps_before: int = 0  # inner_steps when this attempt began
    idle_since: float = 0.0  # since when the trainer could have taken a step and has reported none
    accepted_pushes: int = 0  # since the agent's start
    resets: int = 0  # resets of a model that was not finite, since the last finite push


@dataclass
class OuterSync:
    """The present push or pull, and the state of rank 0's question."""

    phase: SyncPhase = SyncPhase.UNJOINED
    reason: str = "no trainer has attached yet"
    seq: int = 0  # seq of the last push or pull in this incarnation
    accepted_seq: int = 0  # seq of the last accepted push in this incarnation
    result: PushResult | None = None  # result of the newest settled push, for the ranks
    # rank 0's question
    question: int = 0  # number of the question
    waiting: bool = False  # rank 0 waits for the verdict
    verdict: Answer | None = None  # the verdict, given again when the question is repeated; None: none yet
    waits_since: float = 0.0  # when the question was first asked
    # the transfer
    grant: Grant | None = None
    frozen: bool = False  # the ranks have the order to freeze the model for the present push
    frozen_by: int = 0  # the attempt whose progress the open push carries
    merge: bool = False  # the present pull keeps the training since the push was frozen
    ordered: PushId | PullId | None = None  # the transfer that the ranks were last ordered to move
    moved: tuple[int, int] = (0, 0)  # present or last transfer: bytes moved, bytes in all
    moved_at: float = 0.0  # when `moved` was reported
    moving_s: float = 0.0  # time in which bytes moved
    bytes_per_s: float = 0.0  # mean rate over `moving_s`
    moving_at_heartbeat: PushId | PullId | None = None  # the transfer that was moving at the last heartbeat
    halt: str = ""  # why the ranks should end the present transfer; "": they should not; "": they should not
    # what comes next
    pull_due: bool = False
    final_pull_tried: bool = False
    pull_failures: int = 0  # in a row
    backoff_until: float = 0.0  # no push is asked for before this time this time
    place: int = 0  # place in the master's queue for a slot, as last reported; 0: not queued


@dataclass
class RangeRequests:
    """The state of requests for data ranges, beside the open question."""

    seq: int = 0  # seq of the last request in this incarnation
    claimed: tuple[int, ...] = ()  # ranges of a checkpoint that were asked for
    waits: str = ""  # the master's reason for letting this cluster wait
    ended_at: float | None = None  # when the data ended with unsettled progress; None: it has not
    rest_again_at: float = 0.0  # time of the next try to push the remaining progress
    by_step: bool = False  # the trainer reports its progress in ranges with each inner step
    recalls: int = 0  # how often ranges were recalled from the running trainer


@dataclass
class OpenQuestion:
    """A question that the master has not answered."""

    number: int
    event: object
    backoff: Backoff
    pausing: bool = False  # the master could not be reached: the question is repeated after a pause


@dataclass
class HeartbeatTimer:
    """The time of the next heartbeat; at most one is in flight."""

    due_at: float = 0.0
    in_flight: bool = False
    refused_since: float | None = None  # the first refusal (Denied) since the last answer; None: none

    def next_deadline(self) -> float:
        return inf if self.in_flight else self.due_at

    def is_due(self, now: float) -> bool:
        return not self.in_flight and now >= self.due_at


@dataclass
class AgentState:
    """The state of one agent over its life; `now` is the time of the event being handled."""

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
    waits_for: tuple[str, float, bool] = ("", 0.0, False)  # reason of the present wait, since when, whether logged
    leaves_for: str = ""  # why the agent ends, as reported to the master
    failure: ErrorReply | None = None  # why this agent cannot continue, as reported to the ranks; None: it can
    stop: StopTrainer | None = None  # the first reason to stop; None: there is none
    now: float = 0.0
    out: list[Action] = field(default_factory=list)

    @property
    def cluster(self) -> str:
        return self.settings.identity.cluster

    @property
    def joined(self) -> bool:
        """Whether the cluster has an incarnation at the master and is not joining as another."""
        return self.membership.inc > 0 and self.sync.phase is not SyncPhase.JOINING

    @property
    def fraction(self) -> float:
        """Accepted tokens of the run over its target, 0 to 1; 0 without a target."""
        p = self.membership.progress
        return min(1.0, p.tokens / p.tokens_target) if p.tokens_target else 0.0

    @property
    def trains_on(self) -> bool:
        """Whether the trainer trains during every wait: it overlaps and has parameters to train."""
        return self.settings.overlap and self.trainer.base is not None and not self.trainer.must_pull

    @property
    def push_id(self) -> PushId:
        return PushId(self.cluster, self.membership.inc, self.sync.seq)

    @property
    def pull_id(self) -> PullId:
        return PullId(self.cluster, self.membership.inc, self.sync.seq)

    def record_mark(self, kind: str, **fields: object) -> None:
        """Record an event on the timeline."""
        self.out.append(RecordMark(kind, fields))

    def fail_training(self, error: DipsError) -> None:
        """End trainer and agent, since continuing cannot help."""
        self.failure = ErrorReply(type(error).__name__, str(error))
        self.end_training(StopTrainer(treatment_of(error).exit_code, f"{type(error).__name__}: {error}", type(error)))

    def end_training(self, stop: StopTrainer) -> None:
        """Stop the trainer; the first stop decides the agent's exit code."""
        self.stop = self.stop or stop
        self.out.append(stop)

    def update_progress(self, progress: Progress) -> None:
        """Update the run's progress, ignoring older answers that arrive late."""
        if progress.tokens >= self.membership.progress.tokens or progress.finished:
            self.membership.progress = progress
