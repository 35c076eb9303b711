"""All decisions of a master as a pure state machine, its ordered outbox, orders and open questions."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import NamedTuple, Protocol, TypeGuard, cast, get_args

from dips.dataclass import dataclass, replace
from dips.errors import DipsError, StaleTerm, UnavailableSlave, UnresponsiveSlave
from dips.ids import PullId, PushId, VersionId, reads_only
from dips.protocol.alignment import Alignment, WindowTiming
from dips.protocol.effects import Effect, Exit, Joined, Note, OpenPush, Order, Pending, Progress, Registered, Reply
from dips.protocol.enums import ClusterStanding
from dips.protocol.events import (
    Answer,
    Blind,
    ClusterExpelled,
    ClusterJoined,
    Event,
    OrderAnswered,
    OrderFailed,
    PushFinished,
    SlaveRegistered,
    Ticked,
)
from dips.protocol.heartbeats import (
    ClusterHeartbeat,
    ClusterHeartbeatAnswer,
    LiveTransfers,
    SlaveHeartbeat,
    SlaveHeartbeatAnswer,
)
from dips.protocol.options import TimingOptions
from dips.protocol.records import ClusterEnded, RangesLeased, Record
from dips.protocol.slaves import EXIT_STALE
from dips.protocol.view import RunView

# ---- ports ----------------------------------------------------------------------------------------------------------
# The daemon uses the Coordinator, the Judge, the ledger's thread and gRPC; tests use small ones that they can observe.


class CoordinatorLike(Protocol):
    """The part of protocol.coordinator.Coordinator that the core uses."""

    @property
    def term(self) -> int: ...
    @property
    def proven_term(self) -> int: ...
    @property
    def compute_s(self) -> float: ...
    def step(self, event: Event, now: float) -> list[Effect]: ...
    def next_deadline(self) -> float: ...
    def progress(self) -> Progress: ...
    def head(self) -> VersionId: ...
    def cluster_standing(self, cluster: str, inc: int) -> tuple[ClusterStanding, PushId | None, PullId | None]: ...
    def slave_live(self, slave: str, sinc: int) -> tuple[bool, int, LiveTransfers]: ...
    def mirror_wanted(self) -> tuple[VersionId, ...]: ...
    def window_timing(self) -> WindowTiming: ...
    def build_view(self, now: float) -> RunView: ...
    def explain_unready(self) -> str: ...


class JudgeLike(Protocol):
    """The part of protocol.membership.Judge that the core uses."""

    def on_cluster_heartbeat(self, heartbeat: ClusterHeartbeat, now: float) -> list[Event]: ...
    def on_slave_heartbeat(self, heartbeat: SlaveHeartbeat, now: float) -> list[Event]: ...
    def welcome_cluster(self, cluster: str, inc: int, now: float) -> None: ...
    def welcome_slave(self, slave: str, sinc: int, now: float) -> None: ...
    def heard_s(self, cluster: str, now: float) -> float: ...
    def slave_heard_s(self, slave: str, now: float) -> float: ...
    def report_tokens(self, cluster: str) -> list[Event]: ...
    def forget_cluster(self, cluster: str) -> None: ...
    def judge_silence(self, now: float) -> list[Event]: ...
    def skip_gap(self, gap_s: float) -> None: ...
    def next_deadline(self) -> float: ...


class Outside(Protocol):
    """The targets of the core's actions: the ledger's thread and the slaves."""

    def write_records(self, records: Sequence[Record]) -> Awaitable[None]: ...
    def complete_view(self, view: RunView) -> RunView: ...
    def learn_address(self, slave: str, address: str) -> None: ...
    def on_progress(self, progress: SlaveProgress) -> None: ...
    def execute_order(self, order: Order) -> Awaitable[OrderAnswered | OrderFailed]: ...


# ---- outbox ---------------------------------------------------------------------------------------------------------
# The ordered outbox: effects leave in their order, and nothing behind a Record leaves before that record is durable.
#
# All records that wait when the writer is free become one transaction (group commit), so a slow disk costs time and
# never order. Pure: the caller writes, and reports when the transaction is durable. The meaning of effects is not known
# here.


_RECORDS = frozenset(get_args(Record))


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """Answer to heartbeat `req`."""

    req: int
    answer: ClusterHeartbeatAnswer | SlaveHeartbeatAnswer


@dataclass(frozen=True, slots=True)
class SlaveEndpoint:
    """The address of a slave's control server, to which its orders go from now on."""

    slave: str
    address: str


@dataclass(frozen=True, slots=True)
class SlaveProgress:
    """Extension of the deadlines of a slave's orders: its kernels or disk have worked since its last heartbeat.

    Or it has not worked, and some of its orders wait for its disk.
    """

    slave: str
    waiting: frozenset[int] | None = None  # numbers of the orders that are extended; None: all
    most_s: float = inf  # limit of the extension


@dataclass(frozen=True, slots=True)
class WriteRecords:
    """Make these records durable in one transaction, then call `on_written`: nothing behind them leaves before."""

    records: tuple[Record, ...]


Outgoing = (
    Order | Reply | HeartbeatReply | Note | Exit | SlaveEndpoint | SlaveProgress
)  # what may have to wait for a record
Action = Outgoing | WriteRecords  # carried out by the shell, at once and in order


class Outbox:
    """A queue of outgoing items and records, of which at most one transaction is being written."""

    def __init__(self) -> None:
        self._queue: deque[Outgoing | Record] = deque()
        self._writing = False

    def put_item(self, item: Outgoing | Record) -> None:
        """Append an item."""
        self._queue.append(item)

    def take_actions(self) -> list[Action]:
        """Remove and return the actions that may leave now, in order; a WriteRecords can only be the last."""
        actions: list[Action] = []
        if self._writing:
            return actions
        while self._queue:
            if type(self._queue[0]) in _RECORDS:
                actions.append(self._begin_transaction())
                break
            actions.append(cast(Outgoing, self._queue.popleft()))
        return actions

    def has_unwritten(self) -> bool:
        """Whether a record waits, or is being written."""
        return self._writing or any(_is_record(item) for item in self._queue)

    def on_written(self) -> None:
        """Record that the transaction is durable: items behind it may leave."""
        self._writing = False

    def _begin_transaction(self) -> WriteRecords:
        records = tuple(item for item in self._queue if _is_record(item))
        self._queue = deque(item for item in self._queue if not _is_record(item))
        self._writing = True
        return WriteRecords(records)


def _is_record(item: Outgoing | Record) -> TypeGuard[Record]:
    return type(item) in _RECORDS


# ---- held -----------------------------------------------------------------------------------------------------------
# Questions with the answer Pending: kept open, and asked again when something has changed.
#
# A long poll costs its caller one call in about ten seconds, and the master one step for each change that may end the
# wait. Many open questions are asked again less often, so that together they cost about as much as a few. Pure.


@dataclass(frozen=True, slots=True)
class PollOptions:
    """Durations of open questions and intervals of asking them again, in seconds."""

    patience_s: float = 10.0  # then the answer is Pending: well before a client's own deadline of 30 s
    again_s: float = 2.0  # longest time until questions are asked again without a change
    pause_s: float = 0.002  # least pause between two rounds of asking, for each open question
    longest_pause_s: float = 1.0


class HeldQuestion(NamedTuple):
    """A question that is open `until` its caller's patience ends."""

    event: Event
    until: float


class HeldQuestions:
    """All open questions by their `req`, in the order in which they were first asked, so the first one ends first."""

    def __init__(self, options: PollOptions) -> None:
        self._options = options
        self._held: dict[int, HeldQuestion] = {}
        self._asked_at = -inf  # time of the last round of asking
        self._again_at = inf

    def hold_question(self, req: int, question: HeldQuestion, now: float) -> None:
        """Keep a question open that was answered with Pending."""
        self._held[req] = question
        self._again_at = min(self._again_at, now + self._options.again_s)

    def withdraw_question(self, req: int) -> None:
        """Drop a question whose caller has gone."""
        self._held.pop(req, None)

    def on_change(self, now: float) -> None:
        """Plan to ask all questions again after a change that may end the wait of any."""
        if self._held:
            pause_s = min(self._options.longest_pause_s, self._options.pause_s * len(self._held))
            self._again_at = min(self._again_at, max(now, self._asked_at + pause_s))

    def next_deadline(self) -> float:
        """Return when to call `take_due`; inf if no question is open."""
        if not self._held:
            return inf
        return min(next(iter(self._held.values())).until, self._again_at)

    def take_due(self, now: float) -> list[HeldQuestion]:
        """Remove and return the questions to ask again now: all of them, or those whose patience ends."""
        if now >= self._again_at:
            due = list(self._held.values())
            self._held.clear()
            self._asked_at, self._again_at = now, inf
            return due
        due = []
        while self._held and (first := next(iter(self._held.items())))[1].until <= now:
            due.append(self._held.pop(first[0]))
        return due


# ---- orders ---------------------------------------------------------------------------------------------------------
# A deadline limits silence: neither the time that a model's size takes, nor a wait for a disk that heartbeats report.
# Pure: the links to slaves (runtime.py) send, and report the results here. An order that is sent again keeps its
# number, so the slave repeats its answer and not the work.


MISSED_S = 1.0  # a deadline that is noticed later than this has passed while the process was stopped


class SentOrder:
    """An order that was first sent at `now`, on the sender's clock in seconds."""

    def __init__(self, order: Order, now: float) -> None:
        self.order, self.until = order, now + order.deadline_s

    def left_s(self, now: float) -> float:
        """Return how long the slave still has to answer."""
        return max(0.0, self.until - now)

    def on_progress(self, now: float, most_s: float = inf) -> None:
        """Restart the deadline, by at most `most_s`, since the slave works or waits for its disk."""
        self.until = max(self.until, now + min(self.order.deadline_s, most_s))

    @property
    def needs_listener(self) -> bool:
        """Whether to fail at once if the slave's address refuses connections, instead of sending until the deadline.

        True for OpenPush, since a trainer waits for its slot and can ask again.
        """
        return isinstance(self.order.body, OpenPush)

    def on_answer(self, answer: Answer) -> OrderAnswered:
        """Return the event for the slave's answer."""
        return OrderAnswered(self.order.slave, self.order.sinc, self.order.number, answer)

    def on_error(self, error: DipsError, now: float) -> OrderFailed | None:
        """Return the event for a refusal; None, to send the order again, if the slave was unavailable before the
        deadline, or this process did not run when it passed: it read no answers then, and begins the deadline again.
        """
        if not isinstance(error, UnavailableSlave):
            return self.on_refusal(error)
        if now > self.until + MISSED_S:
            self.on_progress(now)
        return None if now < self.until else self.on_deadline()

    def on_refusal(self, error: DipsError) -> OrderFailed:
        """Return the event for an order that will not be carried out."""
        return OrderFailed(self.order.slave, self.order.sinc, self.order.number, type(error), str(error))

    def on_deadline(self) -> OrderFailed:
        """Return the event for an order without an answer in time."""
        return self.on_refusal(UnresponsiveSlave(f"no answer within {self.order.deadline_s:g} s"))


class SlavePatience:
    """Decides from heartbeats which orders of a slave get more time, and how much.

    If the slave has worked, all of them do. Otherwise those that wait for the disk do, until no work was reported for
    `compute_s`: then the disk hangs (docs/protocol.md#timing).
    """

    def __init__(self, compute_s: Callable[[], float]) -> None:
        """`compute_s` is asked at each heartbeat: an operator may change it."""
        self._compute_s = compute_s
        self._seen: dict[str, tuple[int, int]] = {}  # slave → (incarnation, bytes processed)
        self._waiting_since: dict[str, float] = {}  # slave → time since which its disk has reported no work

    def knows(self, slave: str) -> bool:
        return slave in self._seen

    def judge_heartbeat(self, heartbeat: SlaveHeartbeat, now: float) -> SlaveProgress | None:
        """Return the extension that a heartbeat gives its slave's orders; None if none."""
        slave, seen = heartbeat.slave, (heartbeat.sinc, heartbeat.work_bytes)
        before = self._seen.get(slave, seen)
        self._seen[slave] = seen
        has_worked = before[0] == seen[0] and before[1] < seen[1]
        if has_worked or before[0] != seen[0] or not heartbeat.waits:
            self._waiting_since.pop(slave, None)
        if has_worked:
            return SlaveProgress(slave)
        if not heartbeat.waits:
            return None
        left_s = self._waiting_since.setdefault(slave, now) + self._compute_s() - now
        if left_s <= 0.0:
            return None
        return SlaveProgress(slave, frozenset(wait.number for wait in heartbeat.waits), left_s)

    def skip_gap(self, gap_s: float) -> None:
        """Shift all times by `gap_s`, in which the master did not run and received no heartbeats."""
        self._waiting_since = {slave: since + gap_s for slave, since in self._waiting_since.items()}


# ---- core -----------------------------------------------------------------------------------------------------------
# All decisions of a master as a pure state machine: no clock, socket, thread or event loop.
#
# It owns the Coordinator (rounds, pushes and versions), the Judge (which peers are alive), the alignment of pushes,
# open questions, and the outbox. The shell around it (runtime.py) passes in what arrived and what time it is, carries
# out the returned actions, and writes records, in the daemon and in the simulation.
#
# What must stay true: nothing behind a Record leaves before the record is durable, answers to heartbeats included.
# Silence counts only while the shell runs: after a gap every deadline is shifted, and messages that arrived meanwhile
# are read before any peer is judged.


EXIT_LEDGER = 74  # EX_IOERR: a record could not be written; the next term reads the ledger's true state
LEAST_SLEEP_S = 0.001  # least sleep, so that the shell does not spin on a deadline that has passed

Step = Callable[[Event, float], list[Effect]]
Heartbeats = dict[
    tuple[str, str], tuple[ClusterHeartbeat | SlaveHeartbeat, float]
]  # newest by (role, name), when it came


class MasterCore:
    """One term of a master. `now` is monotonic seconds. A shell calls in this order, whenever it runs:

    on_wake(now), then on_heartbeat or take_event for everything that has arrived, then tick(now); it carries out
    take_actions() and sleeps until sleep_until(now) or until something arrives. It answers WriteRecords with on_written
    or on_write_failed.
    """

    def __init__(
        self,
        coordinator: CoordinatorLike,
        judge: JudgeLike,
        timing: TimingOptions,
        now: float,
        *,
        polls: PollOptions = PollOptions(),
        step: Step | None = None,
    ) -> None:
        """`step` wraps `coordinator.step`, to journal or watch every event."""
        self._coordinator, self._judge, self._timing, self._polls = coordinator, judge, timing, polls
        self._decide = step or coordinator.step
        self._alignment = Alignment()
        self._patience = SlavePatience(lambda: coordinator.compute_s)
        self._held = HeldQuestions(polls)
        self._outbox = Outbox()
        self._expected_at = now  # when the shell planned to run again
        self._judging_from = now  # after a gap, no peer is judged before this time
        self.heartbeats: Heartbeats = {}
        self.heartbeat_s = timing.heartbeat_s

    # ---- time ------------------------------------------------------------------------------------------------------

    def on_wake(self, now: float) -> None:
        """Begin a run of the shell; detect a gap if it slept for longer than planned."""
        gap_s = now - self._expected_at
        if gap_s <= self._timing.heartbeat_s:
            return
        self._expected_at = now
        self._judge.skip_gap(gap_s)
        self._patience.skip_gap(gap_s)
        self._step_event(Blind(gap_s), now)
        self._judging_from = now + self._timing.heartbeat_s / 2  # first read what is still in the sockets

    def tick(self, now: float) -> None:
        """Do what is due: judge silence, process the Coordinator's deadlines, ask held questions again."""
        if now < self._judging_from:
            return
        if now >= self._judge.next_deadline():
            for verdict in self._judge.judge_silence(now):
                self._step_event(verdict, now)
        if now >= self._coordinator.next_deadline():
            self._step_event(Ticked(), now)
        for question in self._held.take_due(now):
            self._ask_question(question, now)

    def next_deadline(self) -> float:
        """Return when `tick` has something to do; inf if nothing is due."""
        due = min(self._coordinator.next_deadline(), self._judge.next_deadline(), self._held.next_deadline())
        return max(due, self._judging_from)

    def sleep_until(self, now: float) -> float:
        """Return when the shell must run again: at the next deadline, at most after a heartbeat, to notice a gap."""
        due = max(self.next_deadline(), now + LEAST_SLEEP_S)
        self._expected_at = min(due, now + self._timing.heartbeat_s)
        return self._expected_at

    # ---- what arrives ----------------------------------------------------------------------------------------------

    def take_event(self, event: Event, now: float) -> None:
        """Process an event; a question whose answer is Pending is held open."""
        self._ask_question(HeldQuestion(event, now + self._polls.patience_s), now)

    def withdraw_question(self, req: int) -> None:
        """Forget question `req`, whose caller no longer waits for the answer."""
        self._held.withdraw_question(req)

    def on_heartbeat(self, req: int, heartbeat: ClusterHeartbeat | SlaveHeartbeat, now: float) -> None:
        """Process a heartbeat; its answer leaves as HeartbeatReply."""
        if isinstance(heartbeat, ClusterHeartbeat):
            answer: ClusterHeartbeatAnswer | SlaveHeartbeatAnswer = self._answer_cluster(heartbeat, now)
        else:
            answer = self._answer_slave(heartbeat, now)
        self._outbox.put_item(HeartbeatReply(req, answer))

    # ---- what leaves -----------------------------------------------------------------------------------------------

    def take_actions(self) -> list[Action]:
        """Return the actions to carry out now, in order; each is returned once."""
        return self._outbox.take_actions()

    def has_unwritten(self) -> bool:
        """Whether some record is not durable yet."""
        return self._outbox.has_unwritten()

    def on_written(self) -> None:
        """Record that the records of the last WriteRecords are durable."""
        self._outbox.on_written()

    def on_write_failed(self, error: Exception) -> Exit:
        """Return the Exit after the records of the last WriteRecords could not be written; nothing more leaves."""
        stale = isinstance(error, StaleTerm)
        return Exit(EXIT_STALE if stale else EXIT_LEDGER, f"a record could not be written: {error}")

    # ---- for the shell and people ----------------------------------------------------------------------------------

    @property
    def compute_s(self) -> float:
        """Return how long a slave may be silent in an order that computes, as an operator has last set it."""
        return self._coordinator.compute_s

    def explain_unready(self) -> str:
        """Return why the run cannot take an outer step now; empty if it can."""
        return self._coordinator.explain_unready()

    def build_view(self, now: float) -> RunView:
        """Return the view of the run, with the pace of its clusters but without the parts that lie outside the core."""
        timing, view = self._coordinator.window_timing(), self._coordinator.build_view(now)
        clusters = dict(view.clusters)
        for name, c in view.clusters.items():
            if pace := self._alignment.explain_pace(name, timing, now):
                clusters[name] = dataclasses.replace(c, pace=pace)
        warning = self._alignment.warn_pace(self._timing.heartbeat_s)
        return dataclasses.replace(view, clusters=clusters, pace_warning=warning)

    # ---- heartbeats ------------------------------------------------------------------------------------------------

    def _answer_cluster(self, heartbeat: ClusterHeartbeat, now: float) -> ClusterHeartbeatAnswer:
        name, coordinator = heartbeat.cluster, self._coordinator
        for event in self._judge.on_cluster_heartbeat(heartbeat, now):
            self._step_event(event, now)
        standing, push, pull = coordinator.cluster_standing(name, heartbeat.inc)
        if standing is ClusterStanding.LIVE:  # so that only names known to the Coordinator are kept
            self.heartbeats["cluster", name] = (heartbeat, now)
            if not reads_only(name):
                self._alignment.record_heartbeat(heartbeat)
            if push is not None:  # its commit may wait for the numbers in this heartbeat
                self._report_tokens(name, now)
        push_in_s = self._alignment.push_in_s(name, coordinator.window_timing(), now)
        progress, lease_s = coordinator.progress(), self._timing.lease_s
        head = coordinator.head() if reads_only(name) else None
        return ClusterHeartbeatAnswer(coordinator.proven_term, lease_s, standing, push, pull, progress, push_in_s, head)

    def _answer_slave(self, heartbeat: SlaveHeartbeat, now: float) -> SlaveHeartbeatAnswer:
        coordinator = self._coordinator
        for event in self._judge.on_slave_heartbeat(heartbeat, now):
            self._step_event(event, now)
        register, as_of, live = coordinator.slave_live(heartbeat.slave, heartbeat.sinc)
        register = register or heartbeat.term != coordinator.term
        if not register or self._patience.knows(heartbeat.slave):  # so only names known to it are kept
            progress = self._patience.judge_heartbeat(heartbeat, now)
            if progress is not None:
                self._outbox.put_item(progress)
        if not register:
            self.heartbeats["slave", heartbeat.slave] = (heartbeat, now)
        mirror = coordinator.mirror_wanted() if heartbeat.mirror is not None else ()
        told = None if register or heartbeat.live == live.number else live
        return SlaveHeartbeatAnswer(coordinator.term, self._timing.lease_s, register, as_of, told, mirror)

    # ---- one event -------------------------------------------------------------------------------------------------

    def _ask_question(self, question: HeldQuestion, now: float) -> None:
        """Process one event from outside, for the first time or again."""
        event = question.event
        if type(event) in _COMPLETED:
            event = self._complete_event(event, now)
        self._step_event(event, now, question)

    def _complete_event(self, event: Event, now: float) -> Event:
        """Add what only the Judge knows about the event's peer, and report its tokens to the Coordinator first."""
        if isinstance(event, ClusterJoined):  # it may fence an incarnation whose tokens only heartbeats have reported
            self._report_tokens(event.cluster, now)
            return replace(event, rival_heard_s=self._judge.heard_s(event.cluster, now))
        if isinstance(event, SlaveRegistered):
            return replace(event, rival_heard_s=self._judge.slave_heard_s(event.slave, now))
        if isinstance(event, ClusterExpelled):
            self._report_tokens(event.cluster, now)
        elif isinstance(event, PushFinished):  # its claims are compared with them
            self._report_tokens(event.push.cluster, now)
        return event

    def _report_tokens(self, cluster: str, now: float) -> None:
        for report in self._judge.report_tokens(cluster):
            self._step_event(report, now)

    def _step_event(self, event: Event, now: float, question: HeldQuestion | None = None) -> None:
        """Let the Coordinator decide on an event, and put the effects on the outbox."""
        effects = self._decide(event, now)
        quiet = type(event) in _CHANGE_NOTHING
        if effects:
            self._follow_membership(event, effects, now)
            quiet = quiet and _QUIET.issuperset(map(type, effects))
        if not quiet:
            self._held.on_change(now)
        for effect in effects:
            if question is not None and now < question.until and _is_pending(effect):
                self._held.hold_question(effect.req, question, now)
            else:
                self._outbox.put_item(effect)

    def _follow_membership(self, event: Event, effects: list[Effect], now: float) -> None:
        """Update the Judge and the links if this step begins or ends an incarnation, before any effect leaves."""
        for effect in effects:
            if type(effect) is ClusterEnded:
                self._judge.forget_cluster(effect.cluster)
                self._alignment.forget_cluster(effect.cluster)
                self.heartbeats.pop(("cluster", effect.cluster), None)
            elif type(effect) is Reply:
                match effect.result, event:
                    case Joined(inc=inc), ClusterJoined():
                        self._judge.welcome_cluster(event.cluster, inc, now)
                    case Registered(sinc=sinc), SlaveRegistered():
                        self._judge.welcome_slave(event.slave, sinc, now)
                        self._outbox.put_item(SlaveEndpoint(event.slave, event.address))


_COMPLETED = frozenset({ClusterJoined, SlaveRegistered, ClusterExpelled, PushFinished})
_QUIET = frozenset(
    {Reply, RangesLeased}
)  # effects that end nobody's wait: an answer to another, and ranges that it has now
_CHANGE_NOTHING = frozenset({Ticked, *(kind for kind in get_args(Event) if "req" in kind.__dataclass_fields__)})


def _is_pending(effect: Effect) -> TypeGuard[Reply]:
    return type(effect) is Reply and type(effect.result) is Pending
