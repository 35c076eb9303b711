"""The master's core as stories: what leaves when, what a gap moves, who is kept waiting. Time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dips.errors import StaleTerm
from dips.ids import GENESIS, PullId, PushId
from dips.master.core import (
    EXIT_LEDGER,
    Action,
    HeartbeatReply,
    MasterCore,
    PollOptions,
    SlaveEndpoint,
    SlaveProgress,
    WriteRecords,
)
from dips.protocol.coordinator import Coordinator
from dips.protocol.data import Intervals
from dips.protocol.effects import (
    Acknowledged,
    Committed,
    Dropped,
    Effect,
    Grant,
    Joined,
    Note,
    OpenPull,
    OpenPush,
    Order,
    Pending,
    Reply,
)
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.events import (
    Blind,
    ClusterExpelled,
    ClusterJoined,
    ClusterLeft,
    ClusterSilent,
    Done,
    Event,
    OrderAnswered,
    PullFinished,
    PullRequested,
    PushFinished,
    PushRequested,
    PushStaged,
    SlaveRegistered,
    SlaveSilent,
    Ticked,
    TokensReported,
    TuningAsked,
)
from dips.protocol.heartbeats import (
    OWN_PACE,
    ClusterHeartbeat,
    ClusterHeartbeatAnswer,
    OrderWait,
    SlaveHeartbeat,
    SlaveHeartbeatAnswer,
)
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.membership import Judge
from dips.protocol.options import Options, TimingOptions, TunedOption
from dips.protocol.records import ClusterEnded, LedgerState, Record, RunRow, ScoreHistory, VersionRow
from dips.protocol.slaves import EXIT_STALE

TIMING = TimingOptions(heartbeat_s=2.0, lease_heartbeats=5, transfer_s=60.0)
LEASE_S = TIMING.lease_s
MANIFEST = Manifest((Layer("l", (Parameter("l.w", (4,)),)),))
PULL = PullId("a", 1, 1)
HEARTBEAT = ClusterHeartbeat("a", 1, TrainerState.TRAINING, Activity.INNER, 1, 0, 0, 0, 0.0, GENESIS, 0, 0, 0.0)


class Shell:
    """Drives a core as a process would, on a clock that the test moves; one slave `s`, READY from the beginning."""

    def __init__(self) -> None:
        row = RunRow("r", "c", MANIFEST.to_json(), (("s", (0,)),), ("0" * 32,), (2.0,))
        versions = (VersionRow(GENESIS, GENESIS, True, 0, False),)
        state = LedgerState(row, 3, 1, versions, (), (), (), (), ScoreHistory((), ()), (), Intervals(), None)
        self.now, self.req = 0.0, 0
        self.coordinator = Coordinator(state, MANIFEST, Options(timing=TIMING), self.now)
        self.events: list[Event] = []
        judge = Judge.from_state(TIMING, state, self.now)
        self.core = MasterCore(self.coordinator, judge, TIMING, self.now, polls=PollOptions(), step=self._step)
        self.disk_works = True
        self.unwritten = False
        self.left: list[Action] = []  # what the core let out, in order
        self.ledger: list[Record] = []
        self.answers: dict[int, Any] = {}
        self.ask(lambda r: SlaveRegistered(r, "s", "n", "r", "s:1", ("s:2",), 1, GENESIS, None, (), 2, ""))

    def _step(self, event: Event, now: float) -> list[Effect]:
        self.events.append(event)
        return self.coordinator.step(event, now)

    # ---- time ------------------------------------------------------------------------------------------------------

    def run_to(self, when: float, *heartbeating: str) -> None:
        """Run until then, waking whenever the core wants to; the slave, and those named, heartbeat all the time."""
        while self.now < when:
            self.now = min(self.core.sleep_until(self.now), when)
            self._look()
            self.heartbeat_slave()
            for name in heartbeating:
                self.heartbeat(name)

    def stop_until(self, when: float, *arrived: Event) -> None:
        """The process is stopped, and runs again then; `arrived` came in meanwhile."""
        self.core.sleep_until(self.now)
        self.now = when
        self._look(*arrived)

    def _look(self, *arrived: Event) -> None:
        self.core.on_wake(self.now)
        for event in arrived:
            self.core.take_event(event, self.now)
        self.core.tick(self.now)
        self._carry_out()

    def _carry_out(self) -> None:
        while actions := self.core.take_actions():
            self.left += actions
            for action in actions:
                if isinstance(action, WriteRecords):
                    self.ledger += action.records
                    self.unwritten = True
                elif isinstance(action, Reply):
                    self.answers[action.req] = action.result
                elif isinstance(action, HeartbeatReply):
                    self.answers[action.req] = action.answer
            if self.unwritten and self.disk_works:
                self.finish_write()

    def finish_write(self) -> None:
        self.unwritten = False
        self.core.on_written()
        if not self.disk_works:
            self._carry_out()

    # ---- what arrives ----------------------------------------------------------------------------------------------

    def put(self, event: Event) -> None:
        self._look(event)

    def ask(self, make: Callable[[int], Event]) -> int:
        self.req += 1
        self._look(make(self.req))
        return self.req

    def join(self, name: str = "a", nonce: str = "n", former: int = 0) -> int:
        return self.ask(lambda r: ClusterJoined(r, name, nonce, "r", MANIFEST.digest, "c", former=former))

    def ask_pull(self) -> int:
        return self.ask(lambda r: PullRequested(r, PULL, 1))

    def heartbeat(self, name: str = "a", **fields: Any) -> Any:
        self.req += 1
        self.core.on_heartbeat(self.req, replace(HEARTBEAT, cluster=name, **fields), self.now)
        self._carry_out()
        return self.answers.get(self.req)

    def heartbeat_slave(
        self, term: int = 3, work_bytes: int = 0, live: int = 0, waits: tuple[OrderWait, ...] = ()
    ) -> Any:
        self.req += 1
        heartbeat = SlaveHeartbeat(
            "s", 1, term, GENESIS, (), (), 0, 0, 0, 0, 0.0, 0.0, work_bytes, live=live, waits=waits
        )
        self.core.on_heartbeat(self.req, heartbeat, self.now)
        self._carry_out()
        return self.answers.get(self.req)

    def answer_orders(self, body: type) -> None:
        """The slave answers every order of this kind."""
        for order in [a for a in self.left if isinstance(a, Order) and isinstance(a.body, body)]:
            self.put(OrderAnswered("s", 1, order.number, Done()))

    # ---- what was seen ---------------------------------------------------------------------------------------------

    def noted(self) -> list[str]:
        return [action.kind for action in self.left if isinstance(action, Note)]

    def ended(self) -> list[ClusterEnded]:
        return [record for record in self.ledger if isinstance(record, ClusterEnded)]


@pytest.fixture
def shell() -> Shell:
    return Shell()


# ---- nothing behind a record leaves before it is durable ----------------------------------------------------------


def test_an_answer_waits_for_its_record(shell: Shell) -> None:
    """Joined, and the heartbeat's answer behind it, leave when the incarnation is durable, in this order."""
    shell.disk_works = False
    joining = shell.join()
    assert shell.heartbeat() is None and joining not in shell.answers
    assert isinstance(shell.left[-1], WriteRecords)
    shell.finish_write()
    assert isinstance(shell.answers[joining], Joined)
    replies = [type(a) for a in shell.left if isinstance(a, Reply | HeartbeatReply)]
    assert replies[-2:] == [Reply, HeartbeatReply]


def test_a_slave_that_is_not_heard_once_is_lost_after_a_lease(shell: Shell) -> None:
    """It begins with the registration, not with the first heartbeat."""
    while not any(isinstance(event, SlaveSilent) for event in shell.events):
        shell.now = shell.core.sleep_until(shell.now)
        shell._look()
        assert shell.now <= LEASE_S + TIMING.heartbeat_s, "nobody noticed"
    assert shell.now == LEASE_S


def test_a_slave_is_reachable_before_its_first_order(shell: Shell) -> None:
    """The address of a slave that registers stands before every order to it."""
    kinds = [type(action) for action in shell.left]
    assert kinds.index(SlaveEndpoint) < kinds.index(Reply)
    assert SlaveEndpoint("s", "s:1") in shell.left


@pytest.mark.parametrize(
    ("error", "code"), [(OSError("disk full"), EXIT_LEDGER), (StaleTerm("term 4 has begun"), EXIT_STALE)]
)
def test_a_record_that_cannot_be_written_ends_the_process(shell: Shell, error: Exception, code: int) -> None:
    """Nothing leaves any more; the exit code says whether a later master exists."""
    shell.disk_works = False
    shell.join()
    exits = shell.core.on_write_failed(error)
    assert (exits.code, str(error) in exits.reason) == (code, True)
    shell.heartbeat()
    assert shell.core.take_actions() == []


# ---- a gap is not silence -----------------------------------------------------------------------------------------


def test_a_gap_moves_the_leases(shell: Shell) -> None:
    """A master that was stopped for a minute judges nobody for that minute, and afterwards as ever."""
    shell.join()
    shell.stop_until(60.0)
    assert any(isinstance(event, Blind) and event.gap_s == 58.0 for event in shell.events)
    assert "blind" in shell.noted()
    shell.run_to(60.0 + LEASE_S - TIMING.heartbeat_s - 0.1)
    assert shell.ended() == []
    shell.run_to(60.0 + LEASE_S + 0.1)
    assert [record.cluster for record in shell.ended()] == ["a"]


def test_after_a_gap_nobody_is_judged_before_the_sockets_are_read(shell: Shell) -> None:
    """A lease that would end right after the gap is not judged for half a heartbeat: its heartbeat is on the way."""
    shell.join()
    shell.run_to(LEASE_S - 0.5)
    shell.stop_until(70.0)  # the core meant to look at 10.0, when the lease ends
    assert shell.core.next_deadline() == 70.0 + TIMING.heartbeat_s / 2
    shell.now = 70.9
    shell._look()
    assert shell.heartbeat().standing == "live"
    shell.run_to(75.0)
    assert shell.ended() == []


def test_what_arrived_in_a_gap_is_read_before_a_deadline_is_acted_upon(shell: Shell) -> None:
    """The event that came in while the process was stopped is stepped after Blind and before any Ticked."""
    shell.join()
    shell.heartbeat()
    pull = shell.ask_pull()
    shell.answer_orders(OpenPull)
    shell.events.clear()
    shell.stop_until(500.0, PullFinished(pull + 100, PULL, True))
    shell.run_to(502.0, "a")
    assert [type(event) for event in shell.events][:2] == [Blind, PullFinished]
    assert shell.answers[pull + 100] == Acknowledged()


def test_a_gap_moves_the_deadline_of_a_transfer(shell: Shell) -> None:
    """A pull of 60 s is still granted after ten minutes in which the master did not run, and not if it did."""
    shell.join()
    shell.ask_pull()
    shell.answer_orders(OpenPull)
    shell.stop_until(600.0)
    assert isinstance(shell.answers[shell.ask_pull()], Grant)
    shell.run_to(700.0, "a")
    assert isinstance(shell.answers[shell.ask_pull()], Dropped)


def test_a_slave_that_works_is_told_from_one_that_hangs(shell: Shell) -> None:
    """Its heartbeats count what kernels and disk have done: whenever that rises, its orders have their time again."""

    def told() -> int:
        return sum(isinstance(action, SlaveProgress) for action in shell.left)

    for work_bytes, times in ((0, 0), (8, 1), (8, 1), (9, 2), (9, 2)):
        shell.heartbeat_slave(work_bytes=work_bytes)
        assert told() == times
    shell.heartbeat_slave(term=2, work_bytes=50)
    shell.heartbeat_slave(work_bytes=9)
    assert told() <= 3


def test_a_disk_may_be_silent_for_as_long_as_an_operator_says(shell: Shell) -> None:
    """What waits behind it has the time of `dips set`, not that with which the master began."""
    longer = 4 * TIMING.compute_s
    shell.ask(lambda r: TuningAsked(r, (TunedOption("timing.compute_s", longer),)))
    waits = (OrderWait(7, "OpenPull", 1.0),)
    shell.heartbeat_slave(waits=waits)
    shell.now += 2 * TIMING.compute_s
    shell.heartbeat_slave(waits=waits)
    extended = [action.most_s for action in shell.left if isinstance(action, SlaveProgress)]
    assert extended == [longer, longer - 2 * TIMING.compute_s]


def test_a_gap_is_not_time_in_which_a_disk_hangs(shell: Shell) -> None:
    """An order that waits for it has as much time as before: nobody heard what it did meanwhile."""
    waits = (OrderWait(7, "Persist", 1.0),)
    shell.heartbeat_slave(waits=waits)
    shell.stop_until(2 * TIMING.compute_s)
    shell.heartbeat_slave(waits=waits)
    extended = [action for action in shell.left if isinstance(action, SlaveProgress)]
    left_s = TIMING.compute_s - TIMING.heartbeat_s
    assert [e.most_s for e in extended] == [TIMING.compute_s, pytest.approx(left_s, abs=TIMING.heartbeat_s)]


def test_a_deadline_is_acted_upon_when_it_comes(shell: Shell) -> None:
    """A pull that nobody named is over at its time, and not at the next look."""
    shell.join()
    shell.ask_pull()
    shell.answer_orders(OpenPull)
    shell.run_to(TIMING.transfer_s, "a")
    assert isinstance(shell.answers[shell.ask_pull()], Dropped)


def test_a_delay_of_a_heartbeat_is_no_gap(shell: Shell) -> None:
    """A busy machine that runs the loop a little late moves nothing."""
    shell.stop_until(2 * TIMING.heartbeat_s)
    assert "blind" not in shell.noted()
    shell.stop_until(shell.now + 2 * TIMING.heartbeat_s + 0.1)
    assert "blind" in shell.noted()


# ---- held questions -----------------------------------------------------------------------------------------------


def test_a_held_question_is_answered_when_something_changes(shell: Shell) -> None:
    """A pull that waits for the slaves' pins is answered as soon as the last of them is set, without being asked."""
    shell.join()
    pull = shell.ask_pull()
    shell.run_to(0.5)
    assert pull not in shell.answers
    shell.answer_orders(OpenPull)
    shell.run_to(0.51)
    assert isinstance(shell.answers[pull], Grant)


def test_a_held_question_is_pending_when_patience_ends(shell: Shell) -> None:
    """It is asked again every two seconds, and its answer after ten is Pending, once."""
    shell.join()
    pull = shell.ask_pull()
    shell.run_to(9.9, "a")
    assert pull not in shell.answers
    asked = sum(isinstance(event, PullRequested) for event in shell.events)
    assert 5 <= asked <= 7  # now, every 2 s, and when the heartbeats changed something
    shell.run_to(10.1, "a")
    assert isinstance(shell.answers.pop(pull), Pending)
    shell.run_to(20.0, "a")
    assert pull not in shell.answers


def test_a_caller_that_has_gone_is_not_asked_for(shell: Shell) -> None:
    """A withdrawn question is neither asked again nor answered."""
    shell.join()
    pull = shell.ask_pull()
    shell.core.withdraw_question(pull)
    shell.events.clear()
    shell.answer_orders(OpenPull)
    shell.run_to(15.0, "a")
    assert pull not in shell.answers
    assert not any(isinstance(event, PullRequested) for event in shell.events)


def test_what_changes_nothing_wakes_no_question(shell: Shell) -> None:
    """Questions that are only answered, and ticks without effect, do not wake held questions: polls wake no polls."""
    shell.join()
    shell.ask_pull()
    before = shell.core.next_deadline()
    shell.join()  # the same nonce: answered from what is known
    assert shell.core.next_deadline() == before
    shell.core._step_event(Ticked(), shell.now)
    assert shell.core.next_deadline() == before


def test_a_question_that_changes_something_wakes_the_others(shell: Shell) -> None:
    """At once, and not at the next time when all are asked again."""
    shell.join()
    shell.ask_pull()
    shell.run_to(0.5)
    shell.events.clear()
    shell.join("b")
    shell.run_to(0.51)
    assert any(isinstance(event, PullRequested) for event in shell.events)


# ---- who begins and who ends --------------------------------------------------------------------------------------


def test_last_words_come_before_a_join(shell: Shell) -> None:
    """Tokens that only heartbeats have reported are counted as lost when the next incarnation fences this one."""
    shell.join()
    shell.heartbeat(tokens_consumed=50)
    shell.join(nonce="another process", former=1)
    (ended,) = shell.ended()
    assert (ended.cluster, ended.inc, ended.tokens_lost) == ("a", 1, 50)
    assert shell.heartbeat().standing == "fenced"
    assert shell.heartbeat(inc=2).standing == "live"


def test_what_heartbeats_reported_is_known_before_a_push_is_judged_and_a_cluster_expelled(shell: Shell) -> None:
    """The claims of a push are compared with them, and an expulsion records them as lost."""
    shell.join()
    shell.heartbeat(tokens_consumed=50, inner_steps=5)
    shell.ask(lambda r: PushFinished(r, PushId("a", 1, 1), 50, 5, (), 1.0))
    reports = [event for event in shell.events if isinstance(event, TokensReported)]
    assert [report.tokens_consumed for report in reports] == [50]
    assert shell.events.index(reports[0]) < [type(event) for event in shell.events].index(PushFinished)
    shell.heartbeat(tokens_consumed=70, inner_steps=7)
    shell.put(ClusterExpelled("a", "its certificate was revoked"))
    (ended,) = shell.ended()
    assert ended.tokens_lost == 70


def test_a_commit_that_waits_for_a_heartbeat_is_answered_by_it(shell: Shell) -> None:
    """At once, not when it is asked again; without a push nobody waits, and the Coordinator is told nothing."""
    shell.join()
    shell.heartbeat(tokens_consumed=50, inner_steps=5)
    assert not any(isinstance(event, TokensReported) for event in shell.events)
    shell.ask_pull()
    shell.answer_orders(OpenPull)
    shell.ask(lambda r: PullFinished(r, PULL, True))
    push = PushId("a", 1, 2)
    shell.ask(lambda r: PushRequested(r, push, GENESIS, 1))
    shell.answer_orders(OpenPush)
    shell.put(PushStaged("s", 1, push, 4))
    commit = shell.ask(lambda r: PushFinished(r, push, 80, 8, (), 1.0))
    shell.run_to(0.5)
    assert commit not in shell.answers
    shell.heartbeat(tokens_consumed=80, inner_steps=8)
    shell.run_to(0.51)
    assert shell.answers[commit] == Committed()


def test_who_has_ended_is_forgotten(shell: Shell) -> None:
    """A cluster that left is not judged silent later, is no longer waited for, and its heartbeat is not shown."""
    shell.join()
    shell.heartbeat(aligned_steps=10, step_s=1.0)
    assert ("cluster", "a") in shell.core.heartbeats
    shell.ask(lambda r: ClusterLeft(r, "a", 1, 0))
    assert ("cluster", "a") not in shell.core.heartbeats
    assert shell.heartbeat(aligned_steps=10, step_s=1.0).push_in_s == OWN_PACE
    shell.run_to(3 * LEASE_S)
    assert not any(isinstance(event, ClusterSilent) for event in shell.events)
    assert len(shell.ended()) == 1


def test_who_is_silent_is_forgotten(shell: Shell) -> None:
    """A lease that runs out ends the incarnation once; a heartbeat that comes later is answered "gone"."""
    shell.join()
    shell.heartbeat(aligned_steps=10, step_s=1.0)
    shell.run_to(LEASE_S + 0.1)
    assert [record.cluster for record in shell.ended()] == ["a"]
    answer = shell.heartbeat(aligned_steps=10, step_s=1.0)
    assert (answer.standing, answer.push_in_s) == ("gone", OWN_PACE)
    shell.run_to(3 * LEASE_S)
    assert len(shell.ended()) == 1


# ---- heartbeats ---------------------------------------------------------------------------------------------------


def test_aligned_clusters_are_told_when_to_push(shell: Shell) -> None:
    """Those that align learn in how many seconds their push begins, the others that they keep their own pace."""
    for name in ("a", "b", "c"):
        shell.join(name)
    first = shell.heartbeat("a", aligned_steps=10, step_s=1.0, since_push=0)
    other = shell.heartbeat("b", aligned_steps=10, step_s=1.0, since_push=4)
    alone = shell.heartbeat("c")
    assert isinstance(first, ClusterHeartbeatAnswer)
    assert (first.push_in_s, other.push_in_s, alone.push_in_s) == (10.0, 10.0, OWN_PACE)
    paces = {name: cluster.pace for name, cluster in shell.core.build_view(shell.now).clusters.items()}
    assert paces["a"].startswith("aligned: H 10") and paces["b"].startswith("aligned: H 14") and paces["c"] == ""


def test_a_gap_leaves_the_aligned_grid_where_the_clusters_are(shell: Shell) -> None:
    """The clusters kept working while the master was stopped: the next common time moves by whole periods only."""
    shell.join()
    assert shell.heartbeat(aligned_steps=10, step_s=1.0).push_in_s == 10.0
    shell.stop_until(36.0)  # 34 s later than it meant to
    assert shell.heartbeat(aligned_steps=10, step_s=1.0, since_push=9).push_in_s == pytest.approx(4.0)


def test_a_slave_of_an_older_term_must_register(shell: Shell) -> None:
    """A heartbeat with another master's term is answered with register, whatever the Coordinator remembers."""
    stale, fresh = shell.heartbeat_slave(term=2), shell.heartbeat_slave(term=3)
    assert isinstance(stale, SlaveHeartbeatAnswer)
    assert (stale.register, fresh.register) == (True, False)


def test_a_slave_is_told_what_is_live_when_that_has_changed(shell: Shell) -> None:
    """A list goes to who has another one, or none, or one of another term; its number rises when a pull opens or ends.

    All slaves are told the same object, so that it is spelled once.
    """
    shell.join()
    empty = shell.heartbeat_slave().live
    assert (empty.pushes, empty.pulls) == ((), ())
    assert shell.heartbeat_slave(live=empty.number).live is None
    shell.ask(lambda r: PullRequested(r, PullId("a", 1, 1), 1))
    pulling = shell.heartbeat_slave(live=empty.number).live
    assert (pulling.pulls, pulling.number > empty.number) == ((PullId("a", 1, 1),), True)
    assert shell.heartbeat_slave(live=empty.number).live is pulling
    assert shell.heartbeat_slave(term=2, live=pulling.number).live is None  # it must register
    shell.answer_orders(OpenPull)
    shell.ask(lambda r: PullFinished(r, PullId("a", 1, 1), True))
    over = shell.heartbeat_slave(live=pulling.number)
    assert (over.live.pulls, over.live.number > pulling.number) == ((), True)
    assert shell.heartbeat_slave(live=over.live.number).as_of >= over.as_of


def test_only_known_peers_are_kept_for_the_status(shell: Shell) -> None:
    """The newest heartbeat of a peer that the Coordinator knows is kept; a stranger's is not."""
    shell.heartbeat("stranger")
    assert list(shell.core.heartbeats) == []
    shell.join()
    shell.heartbeat(inner_steps=5)
    shell.heartbeat(inner_steps=6)
    kept, _ = shell.core.heartbeats["cluster", "a"]
    assert isinstance(kept, ClusterHeartbeat) and kept.inner_steps == 6
