"""What a slave says as it comes, refuses or falls silent, and what stays open on it afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.errors import RemoteProtocolError, UnresponsiveSlave
from dips.ids import GENESIS, PullId, VersionId
from dips.protocol import events as ev
from dips.protocol.effects import (
    Abort,
    Acknowledged,
    Apply,
    Commit,
    Dropped,
    DropPush,
    Failed,
    Fold,
    Grant,
    Measure,
    Note,
    OpenPull,
    OpenPush,
    Order,
    Pending,
    Persist,
    Refused,
)
from tests.transcripts.story import Teller
from tests.unit.protocol.scripted_run import ScriptedRun

V1 = VersionId(1, 1)
RESULTS = (Measure, Fold, Apply, Persist)  # the orders of a round, whose answers have a result


def registers(run: ScriptedRun, memory: VersionId | None, *complete: VersionId) -> None:
    run.ask(ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 0, memory, None, complete, 4, ""))


def test_only_the_present_process_of_a_slave_falls_silent() -> None:
    """Neither the one before it, whose lease runs out later, nor a slave of another placement."""
    run = ScriptedRun()
    present = run.view.slaves["s"].sinc
    for slave, sinc in (("s", present - 1), ("t", present)):
        run.step(ev.SlaveSilent(slave, sinc, 99.0))
    assert run.view.slaves["s"].state == "ready"
    run.step(ev.SlaveSilent("s", present, 99.0))
    assert run.view.slaves["s"].state == "lost"


@pytest.mark.parametrize("kind", [Measure, Fold])
def test_a_round_that_a_slave_refuses_leaves_nothing_open_on_it(kind: type) -> None:
    """It may be drained at once; when it comes again, it is told that the round left no version, and only then."""
    run = ScriptedRun(slots=1)
    run.train("a")
    run.outcome(run.push("a"))
    registers(run, V1, V1)
    assert not run.all_of(Abort), "the last round left the head"
    run.held.add(kind)
    push = run.push("a")
    (order,) = run.orders
    run.orders.clear()
    run.step(ev.OrderFailed(order.slave, order.sinc, order.number, RemoteProtocolError, "broken"))
    assert run.outcome(push).kind == "skipped"
    assert isinstance(run.ask(ev.DrainAsked(0, "s")), Acknowledged) and run.view.slaves["s"].state == "draining"
    told = len(run.all_of(Abort))
    registers(run, V1, V1)
    assert [order.round for order in run.all_of(Abort)[told:]] == [2]


@pytest.mark.parametrize("kind", [OpenPull, OpenPush])
def test_a_drain_waits_for_no_answer_about_what_is_over(kind: type) -> None:
    """Its cluster gave the transfer up before all slaves had opened it; a late answer, or refusal, changes nothing."""
    run = ScriptedRun()
    run.train("a")
    run.held.add(kind)
    if kind is OpenPull:
        pull = PullId("a", run.inc("a"), 2)
        run.ask(ev.PullRequested(0, pull, 1))
        run.ask(ev.PullFinished(0, pull, False))
    else:
        run.step(ev.PushAborted(0, run.open_push("a"), "its trainer died"))
    assert isinstance(run.ask(ev.DrainAsked(0, "s")), Acknowledged)
    (order,) = run.orders
    assert run.step(ev.OrderFailed("s", order.sinc, order.number, RemoteProtocolError, "broken")) == []


def test_a_pull_ends_with_a_slave_that_has_a_part_of_it() -> None:
    """Its cluster trains on what it has, and is told so when it asks again."""
    run = ScriptedRun()
    run.train("a")
    question = ev.PullRequested(0, PullId("a", run.inc("a"), 2), 1)
    run.ask(question)
    assert isinstance(run.ask(question), Grant) and run.view.clusters["a"].state == "pulling"
    run.step(ev.SlaveSilent("s", run.view.slaves["s"].sinc, 99.0))
    assert run.view.clusters["a"].state == "training"
    assert run.ask(question) == Dropped("s was lost: silent for 99.0 s")


def test_mirrors_go_on_without_that_of_a_slave_that_is_lost() -> None:
    """It had yet to copy the version that the other's has: that one takes the next, although no version is made."""
    teller = Teller({"window": "0"})
    teller.ready("all", {})
    teller.trains("a", {})
    for name in ("s0", "s1"):
        teller.step(ev.MirrorReported(name, 1, ev.MirrorReport(())))
    for number in (1, 2):
        teller.pushes("a", {"push": f"a/1#{number + 1}", "base": teller.machine.build_view(0.0).head})
        for _ in range(5):  # Measure, Fold, Apply, Persist, Commit
            teller.answers("all", {})
        teller.finishes_pull("a", {"pull": f"a/1^{number + 1}"})
        teller.answers("all", {})
        teller.step(ev.MirrorReported("s1", 1, ev.MirrorReport((V1,))))
    assert teller.machine.mirror_wanted() == (V1,) != (teller.machine.head(),)
    teller.slave_silent("s0", {})
    assert teller.machine.mirror_wanted() == (V1, VersionId(2, 2))


def test_a_drain_waits_for_whatever_is_open() -> None:
    """Pushes, a round, the flip, the next round; it is noted once, and a slave that is drained is not drained again."""
    run = ScriptedRun()
    run.train("a", "b")

    def drained() -> str:
        answer = run.ask(ev.DrainAsked(0, "s"))
        return answer.reason if isinstance(answer, Pending) else type(answer).__name__

    first, second = run.open_push("a"), run.open_push("b")
    assert drained() == "s waits for 2 pushes and 0 pulls"
    run.held = {Commit}
    run.commit(first)
    assert "round 1 (collecting" in drained()
    run.wait(20.0)
    assert drained() == "s waits for the flip to the new version"
    run.commit(second)
    assert drained() == "s waits for the next round"
    run.held.clear()
    run.answer()
    run.wait(20.0)
    run.outcome(first), run.outcome(second)
    assert run.view.slaves["s"].state == "draining" and drained() == "Acknowledged"
    assert [e.kind for e in run.all_of(Note) if e.kind.startswith("slave_drain")] == ["slave_drains", "slave_drained"]
    assert isinstance(run.ask(ev.DrainAsked(0, "t")), Failed)


def test_a_slave_that_is_lost_drains_no_more() -> None:
    """There is nothing to wait for; when it serves again, it goes on serving."""
    run = ScriptedRun()
    run.train("a")
    run.open_push("a")
    assert isinstance(run.ask(ev.DrainAllAsked(0)), Pending)
    run.step(ev.SlaveSilent("s", run.view.slaves["s"].sinc, 99.0))
    for request in (ev.DrainAllAsked(0), ev.DrainAsked(0, "s")):
        assert isinstance(run.ask(request), Refused)
    registers(run, GENESIS)
    run.wait(1.0)
    assert run.view.slaves["s"].state == "ready"
    for _ in range(2):
        assert isinstance(run.ask(ev.DrainAllAsked(0)), Acknowledged)
    assert run.view.slaves["s"].state == "draining"


def test_a_slave_that_was_silent_after_its_drain_is_still_drained() -> None:
    """Its operator was told that it may be stopped, and stops it when a link has come back, too: only its next process
    serves."""
    run = ScriptedRun()
    run.train("a")
    assert isinstance(run.ask(ev.DrainAsked(0, "s")), Acknowledged)
    run.step(ev.SlaveSilent("s", run.view.slaves["s"].sinc, 99.0))
    assert run.view.slaves["s"].state == "lost"
    registers(run, GENESIS)
    assert run.view.slaves["s"].state == "draining" and isinstance(run.ask(ev.DrainAsked(0, "s")), Acknowledged)
    assert isinstance(run.ask(ev.PushRequested(0, run.next_push("a"), GENESIS, 1)), Refused)
    run.ask(ev.SlaveRegistered(0, "s", "m", "r", "s:1", ("s:2",), 0, GENESIS, None, (), 4, "", former_nonce="n"))
    assert run.view.slaves["s"].state == "ready"


def test_a_slave_that_did_not_answer_before_it_served_can_be_drained() -> None:
    """The order to drop a first model, which it has missed twice, stayed open on it: `dips drain` waited for ever."""
    run, held = ScriptedRun(), ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 0, None, None, (), 4, "")
    run.ask(replace(held, unseeded=True))
    run.ask(ev.SeedAsked(0, "p", ("0" * 32,)))
    run.held.add(DropPush)
    run.wait(run.machine.next_deadline() - run.now)
    (order,) = run.orders
    for _ in range(2):
        run.step(ev.OrderFailed("s", order.sinc, order.number, UnresponsiveSlave, "no answer within 10 s"))
    for _ in range(2):  # it answers a Ping in between
        registers(run, GENESIS)
    assert run.view.slaves["s"].state == "ready"
    assert run.ask(ev.DrainAsked(0, "s")) == Acknowledged()


def test_all_that_serve_are_drained_beside_one_that_is_lost() -> None:
    """Nothing is open on that one."""
    teller = Teller({})
    teller.ready("all", {})
    teller.slave_silent("s1", {})
    assert teller.drain("all", {})[-1] == "operator ← Acknowledged"
    assert [slave.state for slave in teller.machine.build_view(0.0).slaves.values()] == ["draining", "lost"]


def test_heartbeats_are_answered_with_one_list_of_transfers_until_it_changes() -> None:
    """All slaves' answers share it; a push that opens or ends makes another."""
    run = ScriptedRun()
    run.train("a")
    idle = run.machine.live_transfers()
    assert run.machine.live_transfers() is idle and idle.pushes == idle.pulls == ()
    push = run.open_push("a")
    busy = run.machine.live_transfers()
    assert run.machine.live_transfers() is busy and busy.pushes == (push,) and busy.number > idle.number
    run.step(ev.PushAborted(0, push, "its trainer died"))
    assert run.machine.live_transfers().pushes == ()


def say(run: ScriptedRun, order: Order, answer: ev.Answer) -> None:
    run.orders.remove(order)
    run.step(ev.OrderAnswered(order.slave, order.sinc, order.number, answer))


@pytest.mark.parametrize(
    ("kind", "answer", "said"),
    [
        *((kind, a, "in answer to") for kind in RESULTS for a in (ev.Done(), ev.ModelKept("of another", None))),
        (Apply, ev.Prepared(VersionId(7, 7)), f"Prepared of {V1}, got one of v7@r7"),
        (Persist, ev.Persisted(VersionId(7, 7), "digest"), f"Persisted of {V1}, got one of v7@r7"),
    ],
)
def test_an_answer_of_another_kind_or_version_skips_the_round(kind: type, answer: ev.Answer, said: str) -> None:
    """As a refusal would: the master ended with an AssertionError, a snapshot without a digest was durable, and a row
    named a version as one that is on a disk where the slave had said that of another.
    """
    run = ScriptedRun()
    run.train("a")
    run.held = {kind}
    push = run.push("a")
    run.wait(11.0)
    (order,) = run.orders
    say(run, order, answer)
    run.held = set()
    run.answer()
    expected = type(run._answer(order.body)).__name__
    assert f"s refused: RemoteProtocolError: expected {expected}" in run.outcome(push).reason and run.head == GENESIS
    assert said in run.outcome(push).reason
    run.push("a")
    run.wait(11.0)
    assert run.head.version == 1, "the run goes on"


def test_momentum_that_is_pinned_without_digests_is_not_granted() -> None:
    """The next question of whoever reads it ended the master with a KeyError; a pull of θ alone needs no digests."""
    run = ScriptedRun()
    run.ask(ev.ClusterJoined(0, "a.puller", "p", "r", run.manifest.digest, "c"))
    for seq, momentum in enumerate((False, True), start=1):
        pull = ev.PullRequested(0, PullId("a.puller", run.inc("a.puller"), seq), 1, momentum=momentum)
        run.held = {OpenPull}
        run.ask(pull)
        (order,) = run.orders
        say(run, order, ev.Done())
        run.held = set()
        answer = run.ask(pull)
        assert isinstance(answer, Dropped if momentum else Grant)
    assert "expected Pinned" in answer.reason
