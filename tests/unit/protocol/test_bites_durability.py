"""Failures of a disk count only in a row; and what a rollback undoes is taken back from its clusters."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from dips.errors import FailedDisk, RemoteProtocolError
from dips.ids import PushId, VersionId
from dips.protocol import events as ev
from dips.protocol.durability import RETRY_S
from dips.protocol.effects import Apply, Note, Order, Pending, Persist, Refused
from dips.protocol.enums import RoundState
from dips.protocol.options import TimingOptions
from dips.protocol.records import RoundReserved, VersionDurable
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun

V1 = VersionId(1, 1)


def find_no_room(run: ScriptedRun) -> Order:
    """Answer the next order, a Persist, that the disk is full; return it."""
    order = run.orders.popleft()
    run.step(ev.OrderFailed(order.slave, order.sinc, order.number, FailedDisk, "full"))
    return order


def fail_persist(run: ScriptedRun) -> None:
    """The next push's version finds no room on the disk."""
    run.held.add(Persist)
    push = run.push("a")
    run.held.clear()
    find_no_room(run)
    assert run.outcome(push).kind == "skipped"


def test_a_snapshot_that_succeeds_ends_the_row_of_failures() -> None:
    """One failure, a success, and another failure are not two in a row; the one after is."""
    run = ScriptedRun()
    run.train("a")
    fail_persist(run)
    assert run.outcome(run.push("a")).kind == "accepted"
    fail_persist(run)
    assert run.view.durability.state == "durable"
    run.held.add(Persist)
    run.push("a")
    order = find_no_room(run)
    assert run.view.durability.state == "degraded"
    run.step(ev.OrderAnswered(order.slave, order.sinc, order.number, ev.Persisted(run.head, "digest")))
    assert run.view.durability.state == "degraded", "its round is over: nobody asks any more"


def run_without_room() -> tuple[ScriptedRun, PushId]:
    """A run whose slave's disk has become full while it wrote the version of this push, with Persist held."""
    run = ScriptedRun()
    run.train("a")
    fail_persist(run)
    run.held.add(Persist)
    push = run.push("a")
    for _ in range(2):  # the row is written without it, and then it is tried again
        find_no_room(run)
    return run, push


def test_a_full_disk_of_which_nothing_was_asked_skips_the_round() -> None:
    """The slave had the same order again at once, without end: it computes in memory alone while disks are full."""
    run, push = run_without_room()
    assert run.outcome(push).kind == "accepted" and run.view.durability.state == "degraded"
    run.held.add(Apply)
    push = run.push("a")
    assert not run.orders[0].body.reserve
    find_no_room(run)
    run.held.remove(Apply)
    run.answer()
    assert run.outcome(push).kind == "skipped" and not [o for o in run.orders if isinstance(o.body, Apply)]


def test_a_snapshot_whose_writer_has_gone_is_written_by_the_next() -> None:
    """Its slave dies while it writes the head late, and comes back with the head: no window waits for the dead one."""
    run = ScriptedRun()
    run.train("a")
    fail_persist(run)
    run.held.add(Persist)
    push = run.push("a")
    find_no_room(run)
    assert run.outcome(push).kind == "accepted" and run.view.durability.state == "degraded"
    run.wait(RETRY_S)
    assert [order.body for order in run.orders] == [Persist(run.head)]
    run.orders.clear()
    run.ask(ev.SlaveRegistered(0, "s", "n2", "r", "s:1", ("s:2",), 0, run.head, None, (), 4, "", rival_heard_s=1e9))
    assert [order.body for order in run.orders] == [Persist(run.head)]
    run.held.clear()
    run.answer()
    assert run.view.durability.state == "durable"
    assert run.outcome(run.push("a")).kind == "accepted"


def test_a_slave_whose_disk_lacks_the_head_is_not_drained() -> None:
    """The run goes on without snapshots: whoever stopped the slave to give it a larger disk would lose the versions."""
    run, push = run_without_room()
    assert run.outcome(push).kind == "accepted" and not run.orders and not run.view.durability.head
    for question in (ev.DrainAsked(0, "s"), ev.DrainAllAsked(0)):
        answer = run.ask(question)
        assert isinstance(answer, Pending) and f"{run.head} to be on every disk: versions are not" in answer.reason
    run.held.clear()
    run.wait(RETRY_S)
    assert run.view.durability.head and run.view.slaves["s"].state == "draining"


def test_a_slave_that_does_not_serve_is_not_stopped_with_a_head_that_no_disk_has() -> None:
    """Before it registers again, with a new master or after it was silent, the version lies in its memory all the
    same; when it is on the disk the slave may go, whether it serves or not.
    """
    run = ScriptedRun(replace(OPTIONS, durability="async"))
    run.train("a")
    run.held.add(Persist)
    assert run.outcome(run.push("a")).kind == "accepted" and not run.view.durability.head
    for number in (1, 2):
        run.step(ev.SlaveSilent("s", number, 99.0))
        run.orders.clear()
        for question in (ev.DrainAsked(0, "s"), ev.DrainAllAsked(0)):
            answer = run.ask(question)
            assert isinstance(answer, Pending | Refused), answer
            assert isinstance(answer, Pending) == (number == 1)
            assert isinstance(answer, Refused) or f"s is lost (silent for 99.0 s), and {V1} may be" in answer.reason
        run.held.clear()
        run.ask(
            ev.SlaveRegistered(
                0, "s", f"n{number + 1}", "r", "s:1", ("s:2",), 0, V1, None, (), 4, "", rival_heard_s=1e9
            )
        )
    assert run.view.durability.head


def test_tokens_of_a_version_that_is_undone_are_taken_back() -> None:
    """From the run's total and from their cluster's, where they are shown as undone."""
    run = ScriptedRun()
    run.train("a")
    for tokens in (100, 30):
        run.outcome(run.push("a", tokens=tokens))
    lost = ev.SlaveRegistered(0, "s", "n2", "r", "s:1", ("s:2",), 0, None, None, (V1,), 4, "")
    run.ask(lost)
    cluster = run.view.clusters["a"]
    assert run.head == V1 and run.view.progress.tokens == 100
    assert run.machine.mirror_wanted()[-1] == V1, "no mirror copies what is undone"
    assert (cluster.tokens_accepted, cluster.tokens_undone) == (100, 30)
    assert cluster.accepted == 1


def test_a_run_that_stops_for_its_disks_keeps_nobody_waiting() -> None:
    """A window was open when the snapshot failed for the second time: its push is skipped, its cluster trains on."""
    run = ScriptedRun(replace(OPTIONS, durability="async", on_persist_failure="stop"))
    run.train("a", "b")
    run.held.add(Persist)
    run.push("a")
    run.wait(11.0)
    for waits_s in (RETRY_S, 0.0):
        (order,) = run.orders
        run.orders.clear()
        push = None if waits_s else run.push("b")
        run.step(ev.OrderFailed(order.slave, order.sinc, order.number, FailedDisk, "full"))
        run.wait(waits_s)
    assert run.view.durability.state == "stopped" and push is not None
    assert run.outcome(push).kind == "skipped" and run.view.clusters["b"].state == "training"


def test_pushes_that_wait_behind_the_last_failure_are_skipped() -> None:
    """And one that still moves is dropped: no round will take them before a person has repaired the disk."""
    run = ScriptedRun(replace(OPTIONS, on_persist_failure="stop"))
    run.train("a")
    fail_persist(run)
    run.train("b", "c")
    run.held.add(Persist)
    run.push("a")
    run.wait(11.0)
    waiting, _ = run.push("b"), run.open_push("c")
    (order,), reserved = run.orders, run.all_of(RoundReserved)
    run.step(ev.OrderFailed(order.slave, order.sinc, order.number, FailedDisk, "full"))
    assert run.view.durability.state == "stopped"
    assert run.outcome(waiting).kind == "skipped" and run.view.clusters["c"].state == "training"
    assert run.all_of(RoundReserved) == reserved, "no round is begun for it"


def test_a_window_ends_by_time_unless_its_version_would_overwrite_what_is_written() -> None:
    """Until the head is on the disks it has no end; then 100 s after its first push."""
    run = ScriptedRun(replace(OPTIONS, durability="async", timing=TimingOptions(window_s=100.0)))
    run.train("a", "b")
    run.held.add(Persist)
    for push in [run.push(name) for name in "ab"]:
        assert run.outcome(push).kind == "accepted"
    run.wait(1.0)
    run.push("a")
    assert [order.body for order in run.orders] == [Persist(run.head)] and run.machine.next_deadline() == inf
    run.held.clear()
    run.answer()
    assert run.machine.next_deadline() == run.now + 100.0


def test_a_late_snapshot_is_tried_again_between_rounds_and_in_windows() -> None:
    """After RETRY_S, also while a window is open; not while a version is being made. A disk that fails is counted,
    once; another refusal is not.
    """
    run = ScriptedRun(replace(OPTIONS, durability="async", timing=TimingOptions(window_s=100.0)))
    run.train("a", "b")
    run.held.add(Persist)
    pushes = [run.push(name) for name in "ab"]
    for error, failures in ((RemoteProtocolError, 0), (FailedDisk, 1)):
        (order,) = run.orders
        assert order.body == Persist(run.head)
        run.orders.clear()
        for _ in range(2):
            run.step(ev.OrderFailed(order.slave, order.sinc, order.number, error, "broken"))
        said = [e.kind for e in run.effects if isinstance(e, Note)]
        assert (said.count("order_refused"), said.count("persist_failed")) == (1, failures)
        assert run.machine.next_deadline() == run.now + RETRY_S
        run.wait(RETRY_S - 1.0)
        assert not run.orders
        if failures:
            for push in pushes:
                run.outcome(push)
            run.push("a")
            assert run.machine.capture_state().round.state is RoundState.COLLECTING  # type: ignore[attr-defined]
        run.wait(1.0)
    (order,) = run.orders
    run.held.clear()
    run.answer()
    assert [row.version for row in run.all_of(VersionDurable)] == [run.head]
    assert run.machine.next_deadline() > run.now


@pytest.mark.parametrize("failed", [False, True])
def test_a_snapshot_for_which_a_slave_is_missing_is_due_at_no_time(failed: bool) -> None:
    """It is ordered when the slave is back: a master that looked at the clock for it would do nothing else."""
    run = ScriptedRun(replace(OPTIONS, durability="async"))
    run.train("a")
    run.held.add(Persist)
    run.outcome(run.push("a"))
    if failed:
        (order,) = run.orders
        run.step(ev.OrderFailed(order.slave, order.sinc, order.number, FailedDisk, "full"))
    run.step(ev.SlaveSilent("s", run.view.slaves["s"].sinc, 99.0))
    run.wait(RETRY_S)
    assert run.machine.next_deadline() > run.now


def test_no_snapshot_is_ordered_while_a_version_is_made() -> None:
    """Slaves would write what they are about to overwrite."""
    run = ScriptedRun(replace(OPTIONS, durability="async"))
    run.train("a")
    run.held.add(Persist)
    run.outcome(run.push("a"))
    order = run.orders.popleft()
    run.held = {Apply}
    run.step(ev.OrderFailed(order.slave, order.sinc, order.number, FailedDisk, "full"))
    run.push("a")
    run.wait(RETRY_S)
    assert [type(order.body) for order in run.orders] == [Apply]
    run.held.clear()
    run.answer()
    assert [row.version for row in run.all_of(VersionDurable)] == [run.head]
