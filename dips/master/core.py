"""All decisions of a master as a pure state machine: no clock, socket, thread or event loop.

It owns the Coordinator (rounds, pushes and versions), the Judge (which peers are alive), the alignment of pushes, open
questions, and the outbox. A shell around it passes in what arrived and what time it is, carries out the returned
actions, and writes records; the daemon (runtime.py) and the simulated master (dips/sim/master.py) are two such shells.

What must stay true: nothing behind a Record leaves before the record is durable, answers to heartbeats included.
Silence counts only while the shell runs: after a gap every deadline is shifted, and messages that arrived meanwhile are
read before any peer is judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeGuard, get_args

from dips.dataclass import replace
from dips.errors import StaleTerm
from dips.master.held import HeldQuestion, HeldQuestions, PollOptions
from dips.master.orders import SlavePatience
from dips.master.outbox import Action, HeartbeatReply, Outbox, SlaveEndpoint
from dips.master.ports import CoordinatorLike, JudgeLike
from dips.protocol.alignment import Alignment
from dips.protocol.effects import Effect, Exit, Joined, Pending, Registered, Reply
from dips.protocol.enums import ClusterStanding
from dips.protocol.events import Blind, ClusterExpelled, ClusterJoined, Event, PushFinished, SlaveRegistered, Ticked
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer, SlaveHeartbeat, SlaveHeartbeatAnswer
from dips.protocol.options import TimingOptions
from dips.protocol.records import ClusterEnded, RangesLeased
from dips.protocol.slaves import EXIT_STALE
from dips.protocol.view import RunView

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
        self._patience = SlavePatience(timing.compute_s)
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
        self._alignment.skip_gap(gap_s)
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
        due, judged, asked = self._coordinator.next_deadline(), self._judge.next_deadline(), self._held.next_deadline()
        due = judged if judged < due else due
        due = asked if asked < due else due
        return due if due > self._judging_from else self._judging_from

    def sleep_until(self, now: float) -> float:
        """Return when the shell must run again: at the next deadline, at most after a heartbeat, to notice a gap."""
        due, least, most = self.next_deadline(), now + LEAST_SLEEP_S, now + self._timing.heartbeat_s
        self._expected_at = due = (least if due < least else due) if due < most else most
        return due

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

    # ---- for people ------------------------------------------------------------------------------------------------

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
            self._alignment.record_heartbeat(heartbeat)
            if push is not None:  # its commit may wait for the numbers in this heartbeat
                self._report_tokens(name, now)
        push_in_s = self._alignment.push_in_s(name, coordinator.window_timing(), now)
        progress, lease_s = coordinator.progress(), self._timing.lease_s
        return ClusterHeartbeatAnswer(coordinator.proven_term, lease_s, standing, push, pull, progress, push_in_s)

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
