"""The agent's vocabulary: its state, the phases of an outer step, the actions it orders, its questions to the master,
and its remarks for the operator. No decision is made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import field
from enum import StrEnum
from math import inf
from random import Random

from dips.client.agent.account import NO_INCARNATION, Account, Pace, PastIncarnation, RangeQueue, Tally
from dips.client.ipc.messages import Answer, ErrorReply, PipelineReported, PushResult
from dips.dataclass import dataclass
from dips.errors import DipsError, treatment_of
from dips.ids import PullId, PushId, VersionId
from dips.printable import make_printable
from dips.protocol.effects import Grant, Progress
from dips.protocol.enums import Activity, DivergencePolicy, RemarkSubject
from dips.protocol.heartbeats import REMARK_CHARS, ClusterHeartbeat, Remark
from dips.transport.backoff import Backoff

# ---- actions --------------------------------------------------------------------------------------------------------


class Channel(StrEnum):
    """A channel of questions to the master: each has at most one open question, and a new one replaces it."""

    SYNC = "sync"
    RANGES = "ranges"


@dataclass(frozen=True, slots=True)
class AskMaster:
    """Send `event` to the master once, after `delay_s`; cancel the open or planned question of the same channel.

    The reply goes to `on_reply`, a failure to `on_error`; the core decides whether to ask again.
    """

    channel: Channel
    number: int  # the same for each repetition of a question
    event: object
    delay_s: float


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Send this heartbeat now; the answer goes to `on_heartbeat_reply`, a failure to `on_heartbeat_error`."""

    heartbeat: ClusterHeartbeat
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SaveIncarnation:
    """Save the state that the next agent needs if this one dies, before any later action is done."""

    past: PastIncarnation


@dataclass(frozen=True, slots=True)
class RecordMark:
    """Write a mark to the timeline and the log."""

    kind: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StopTrainer:
    """Stop the trainer and exit with `code`, since continuing cannot help."""

    code: int
    reason: str
    error: type[DipsError] | None = None  # None: our bug


Action = AskMaster | SendHeartbeat | SaveIncarnation | RecordMark | StopTrainer
Actions = list[Action]

# The incarnation is saved at these marks, besides each heartbeat. At the end of a push this includes the progress that
# may be settled from now on, so that the next agent never reports too few tokens as missing.
SAVED_AT = frozenset({"joined", "push_end"})


# ---- phases ---------------------------------------------------------------------------------------------------------


class SyncPhase(StrEnum):
    """The phase of the present push or pull."""

    UNJOINED = "unjoined"
    JOINING = "joining"
    RESTING = "resting"
    ASKING_PUSH = "asking for a push"
    PUSHING = "pushing"
    FINISHING = "finishing a push"
    AWAITING = "awaiting the outcome"
    ABORTING = "aborting a push"
    ASKING_PULL = "asking for a pull"
    PULLING = "pulling"
    CLOSING = "closing a pull"
    UNSURE = "unsure whether this incarnation is over"


# The activity that heartbeats report and `dips status` shows; in other phases the trainer does not wait.
ACTIVITY: Mapping[SyncPhase, Activity] = {
    SyncPhase.JOINING: Activity.IDLE,
    SyncPhase.ASKING_PUSH: Activity.PUSH,
    SyncPhase.PUSHING: Activity.PUSH,
    SyncPhase.FINISHING: Activity.PUSH,
    SyncPhase.AWAITING: Activity.WINDOW,
    SyncPhase.ASKING_PULL: Activity.PULL,
    SyncPhase.PULLING: Activity.PULL,
    SyncPhase.CLOSING: Activity.PULL,
}

# The cause (tally.CAUSES) under which a wait in each phase is counted.
STANDSTILL: Mapping[SyncPhase, str] = {
    SyncPhase.UNJOINED: "join",
    SyncPhase.JOINING: "join",
    SyncPhase.RESTING: "join",
    SyncPhase.UNSURE: "join",
    SyncPhase.ASKING_PUSH: "slot",
    SyncPhase.PUSHING: "push",
    SyncPhase.FINISHING: "push",
    SyncPhase.ABORTING: "push",
    SyncPhase.AWAITING: "window",
    SyncPhase.ASKING_PULL: "pull",
    SyncPhase.PULLING: "pull",
    SyncPhase.CLOSING: "pull",
}


# ---- questions ------------------------------------------------------------------------------------------------------
# A master that does not answer is asked again after a pause that doubles up to `retry_s`; a heartbeat that reaches it
# ends the pause. A reply to a question that is no longer open is ignored.


ASK_AGAIN_S = 0.05  # pause after Pending; the master itself holds the question open
FIRST_PAUSE_S = 0.2  # pause before the second try to reach the master
MOST_PAUSE_S = 5.0  # longest such pause: a thousand agents then ask a master that comes back 200 times a second


def ask_master(s: AgentState, channel: Channel, event: object, delay_s: float = 0.0) -> None:
    """Ask a new question; it replaces the open question of the channel."""
    s.questions_asked += 1
    backoff = Backoff(FIRST_PAUSE_S, s.settings.retry_s, s.rng)
    s.questions[channel] = OpenQuestion(s.questions_asked, event, backoff, s.now + delay_s)
    _send_question(s, channel, delay_s)


def repeat_question(s: AgentState, channel: Channel, delay_s: float = ASK_AGAIN_S) -> None:
    """Repeat a question that the master answered with Pending or a refusal to be retried."""
    s.questions[channel].backoff.reset()
    _send_question(s, channel, delay_s)


def repeat_after_pause(s: AgentState, channel: Channel) -> None:
    """Repeat a question after a pause, since the master did not answer."""
    question = s.questions[channel]
    question.pausing = True
    s.out.append(AskMaster(channel, question.number, question.event, question.backoff.next_pause_s()))


def end_pauses(s: AgentState) -> None:
    """Repeat at once all questions that pause, since the master can be reached."""
    for channel, question in s.questions.items():
        if question.pausing:
            _send_question(s, channel, 0.0)


def is_open(s: AgentState, ask: AskMaster) -> bool:
    """Return whether the answer to this question is still awaited."""
    question = s.questions.get(ask.channel)
    return question is not None and question.number == ask.number


def close_channel(s: AgentState, channel: Channel) -> None:
    """Ignore replies in this channel until the next question."""
    s.questions.pop(channel, None)


def _send_question(s: AgentState, channel: Channel, delay_s: float) -> None:
    question = s.questions[channel]
    question.pausing = False
    s.out.append(AskMaster(channel, question.number, question.event, delay_s))


# ---- remarks --------------------------------------------------------------------------------------------------------
# Subjects are few and fixed, so nothing grows; a remark that is repeated with the same text is not logged again.


WAIT_TOLD_S = 5.0  # a wait of this length is logged
# wart: a master of release 0.1.0 refuses each heartbeat with a word that it does not know, and the lease ends.
TOLD_AS = {RemarkSubject.INSIDE: RemarkSubject.SCRIPT}


def make_remark(s: AgentState, subject: RemarkSubject, text: str) -> None:
    """Log a remark that names its remedy; it holds until it is dropped."""
    if s.remarks.get(subject) != text:
        s.remarks[subject] = text
        s.record_mark("remark", subject=subject, text=text)


def drop_remark(s: AgentState, subject: RemarkSubject) -> None:
    """Drop the remark on a subject, since it no longer holds."""
    s.remarks.pop(subject, None)


def list_remarks(s: AgentState) -> tuple[Remark, ...]:
    """Return all remarks that hold, for a heartbeat."""
    return tuple(
        Remark(TOLD_AS.get(subject, subject), make_printable(text)[:REMARK_CHARS])
        for subject, text in s.remarks.items()
    )


def tell_certificate(s: AgentState, problem: str) -> None:
    """Remark why a renewed certificate is not used while the former one still is; drop the remark if `problem` is
    empty.
    """
    if problem:
        make_remark(s, RemarkSubject.CERTIFICATE, f"certificate: {problem}")
    else:
        drop_remark(s, RemarkSubject.CERTIFICATE)


def tell_wait(s: AgentState) -> None:
    """Log once for each reason what a waiting trainer, or one that has not joined, is waiting for."""
    stands = s.trainer.alive and (s.sync.waiting or not s.joined)
    reason = s.sync.reason if stands else ""
    told, since, is_told = s.waits_for
    if reason != told:
        s.waits_for = (reason, s.now, False)
    elif reason and not is_told and s.now - since >= WAIT_TOLD_S:
        s.waits_for = (reason, since, True)
        s.record_mark("waits", reason=reason)


# ---- state ----------------------------------------------------------------------------------------------------------
# Three dataclasses hold the cluster's standing with the master (Membership), its trainer (TrainerAttempt) and the
# present push or pull (OuterSync). Further ones hold the progress (Account), the data ranges (RangeQueue,
# RangeRequests), the time of the next push (Pace), the use of time (Tally) and the open questions to the master
# (OpenQuestion). The functions over them are in modules by subject; core.py calls them.


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
    before_start: tuple[str, ...] = ()  # the command that is run before each start of the training command
    before_start_s: float = 600.0  # after which it is ended: the cluster's `collective_s`, since all ranks wait for it

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
    unreachable_since: float | None = None  # None: the master answers
    times_taken: int = 0  # Joins refused in a row because another agent has the name


@dataclass(frozen=True, slots=True)
class Crash:
    """One unwanted end of the training command, or of `before_start`."""

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
    must_pull: bool = False  # its work, of a former incarnation or base, will be overwritten by a pull
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
    pipeline: PipelineReported | None = None  # how the last step of a planned pipeline was played
    inside_changes: dict[str, int] = field(default_factory=dict)  # by InsideChanged.what, since the agent's start
    restarts_for: str = ""  # why the ranks of this attempt end on purpose; "": they do not


@dataclass
class TransferMeter:
    """The bytes that the ranks have moved in the present or last transfer, and their rate."""

    nbytes: int = 0
    total: int = 0
    at: float = 0.0  # when they were reported
    moving_s: float = 0.0  # time in which bytes moved
    bytes_per_s: float = 0.0  # mean rate over `moving_s`, of the former transfer until bytes of this one are reported
    push_bytes_per_s: float = 0.0  # of the present or last push, by which pushes are planned; 0: there was none

    def reset_bytes(self) -> None:
        """Forget the bytes of the last transfer."""
        self.nbytes = self.total = 0

    def begin_moving(self, now: float) -> None:
        """Begin to measure, before the ranks move bytes."""
        self.reset_bytes()
        self.at, self.moving_s = now, 0.0

    def record_bytes(self, nbytes: int, total: int, now: float, idle_s: float, staggered: bool) -> None:
        """Record the bytes moved over all ranks; `idle_s` is the time before this report in which none moved."""
        if not staggered or nbytes > self.nbytes:  # between two fragments the link is idle, not slow
            self.moving_s += max(0.0, now - self.at - max(0.0, idle_s))
        self.nbytes, self.total, self.at = nbytes, total, now
        self.bytes_per_s = nbytes / max(self.moving_s, 1e-3)


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
    stands: bool = True  # the ranks take no inner step meanwhile: they did not ask for an answer at once
    verdict: Answer | None = None  # the verdict, given again when the question is repeated; None: none yet
    waits_since: float = 0.0  # when the question was taken
    heard: int = 0  # number of the newest question, which is not taken before the last transfer is over
    heard_at: float = 0.0  # when a push or pull was last wanted
    demanded: bool = False  # its script demands a push, and none was settled since
    # the transfer
    grant: Grant | None = None
    frozen: bool = False  # the ranks have the order to freeze the model for the present push
    frozen_by: int = 0  # the attempt whose progress the open push carries
    merge: bool = False  # the present pull keeps the training since the push was frozen
    ordered: PushId | PullId | None = None  # the transfer that the ranks were last ordered to move
    meter: TransferMeter = field(default_factory=TransferMeter)
    moving_at_heartbeat: PushId | PullId | None = None  # the transfer that was moving at the last heartbeat
    halt: str = ""  # why the ranks should end the present transfer; "": they should not
    # what comes next
    pull_due: bool = False
    final_tried: VersionId | None = None  # the last version whose pull was tried; a run may go on and end with another
    pull_failures: int = 0  # in a row
    backoff_until: float = 0.0  # no push is asked for before this time
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
    asked_at: float  # when it is first asked, which may be after a pause
    pausing: bool = False  # the master could not be reached: the question is repeated after a pause


@dataclass
class HeartbeatTimer:
    """The time of the next heartbeat; at most one is in flight."""

    due_at: float = 0.0
    in_flight: bool = False
    refused_since: float | None = None  # the first refusal (Denied) since the last answer; None: none
    overtaken: bool = False  # a reply has told of the run's progress since the last heartbeat was sent
    told_steps: int = 0  # inner steps since the last push, as the last heartbeat told

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
    remarks: dict[RemarkSubject, str] = field(default_factory=dict)  # what a person should know now: state.py
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

    def update_progress(self, progress: Progress, newest: bool = False) -> None:
        """Update the run's progress, which only a rollback lowers: less is believed of the `newest` answer alone, since
        others may arrive late.
        """
        self.heartbeats.overtaken = True
        if newest or progress.tokens >= self.membership.progress.tokens or progress.finished:
            self.membership.progress = progress
