"""A master that was stopped for a while (Blind): its own absence costs nobody a deadline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.errors import FailedDisk
from dips.ids import PullId
from dips.protocol import events as ev
from dips.protocol.effects import OpenPull, Persist
from dips.protocol.options import StopOptions, TimingOptions
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun

GAP_S = 1000.0
PULL = PullId("a", 1, 1)


def make(**timing: float) -> ScriptedRun:
    run = ScriptedRun(replace(OPTIONS, timing=TimingOptions(**timing)))  # type: ignore[arg-type]
    run.train("a", "b")
    return run


def gap(run: ScriptedRun) -> None:
    """Nobody looked for GAP_S; then time is looked at again."""
    run.now += GAP_S
    run.step(ev.Blind(GAP_S))
    run.step(ev.Ticked())


def test_a_push_that_moves_keeps_the_rest_of_its_deadline() -> None:
    run = make(transfer_s=100.0)
    run.wait(10.0)
    run.open_push("a")
    before = run.machine.next_deadline()
    gap(run)
    assert run.view.clusters["a"].state == "pushing"
    assert run.machine.next_deadline() == pytest.approx(before + GAP_S)
    run.wait(101.0)
    assert run.view.clusters["a"].state == "training"


def test_a_pull_that_moves_keeps_the_rest_of_its_deadline() -> None:
    run = make(transfer_s=100.0)
    pull = ev.PullRequested(0, replace(PULL, seq=9), 1)
    run.ask(pull)
    gap(run)
    assert run.view.clusters["a"].state == "pulling" and run.all_of(OpenPull)
    run.wait(101.0)
    assert run.view.clusters["a"].state == "training"


def test_an_open_window_keeps_the_rest_of_its_time() -> None:
    run = make(window_s=60.0)
    run.push("a")
    gap(run)
    assert run.committed == [] and run.view.round.state == "collecting"
    run.push("b")
    assert len(run.committed[-1].folds) == 2


def test_a_gap_is_nobodys_pace() -> None:
    """Two requests with a gap between them are as far apart as the clusters worked."""
    run = ScriptedRun()
    run.train("a")
    run.outcome(run.push("a"))
    run.wait(30.0)
    gap(run)
    run.push("a")
    assert run.view.clusters["a"].pace_s == pytest.approx(30.0)


def test_a_gap_moves_when_the_next_push_is_expected() -> None:
    """A window that waited for it before still does."""
    run = ScriptedRun()
    run.train("a")
    for _ in range(2):
        run.outcome(run.push("a"))
        run.wait(30.0)
    before = run.machine._run.next_pushes.first_at()
    assert before > run.now - 30.0
    gap(run)
    assert run.machine._run.next_pushes.first_at() == pytest.approx(before + GAP_S)


def test_a_gap_is_not_time_of_the_run() -> None:
    run = ScriptedRun(replace(OPTIONS, stop=StopOptions(wall_s=50.0)))
    run.wait(20.0)
    gap(run)
    assert run.view.finished is None
    run.wait(30.0)
    assert run.view.finished


def test_a_disk_that_failed_rests_for_its_whole_pause() -> None:
    """After a snapshot that failed late the next try is 30 s of looking later."""
    run = ScriptedRun(replace(OPTIONS, durability="async"))
    run.train("a")
    run.held.add(Persist)
    run.outcome(run.push("a"))
    (order,) = run.orders
    run.orders.clear()
    run.step(ev.OrderFailed(order.slave, order.sinc, order.number, FailedDisk, "full"))
    assert run.machine.next_deadline() == pytest.approx(30.0)
    gap(run)
    assert not run.orders
    run.wait(30.0)
    assert [type(o.body) for o in run.orders] == [Persist]
