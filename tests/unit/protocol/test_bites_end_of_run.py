"""A run ends when what `stop` names is reached: at that moment, and not before."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from dips.ids import VersionId
from dips.protocol.effects import Finished, Persist
from dips.protocol.events import PushRequested, RangesRequested, RollbackAsked, SlaveRegistered
from dips.protocol.options import DataOptions, StopOptions
from dips.protocol.records import RunFinished
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun


def make(stop: StopOptions) -> ScriptedRun:
    run = ScriptedRun(replace(OPTIONS, stop=stop))
    run.train("a")
    return run


def test_the_run_ends_with_the_token_that_stop_names() -> None:
    """One token fewer goes on; exactly as many end the run, by a row, and no push is granted any more."""
    run = make(StopOptions(tokens=200))
    run.outcome(run.push("a", tokens=199))
    assert run.view.finished is None
    run.outcome(run.push("a", tokens=1))
    assert run.view.finished == "v2@r2"
    assert [row.version for row in run.all_of(RunFinished)] == [run.head]
    assert isinstance(run.ask(PushRequested(0, run.next_push("a"), run.head, 1)), Finished)


def test_the_run_ends_with_its_last_version() -> None:
    run = make(StopOptions(versions=2))
    run.outcome(run.push("a"))
    assert run.view.finished is None
    run.outcome(run.push("a"))
    assert run.view.finished == "v2@r2"


def test_the_run_ends_when_its_time_is_over() -> None:
    """Nobody needs to push: the master wakes at `stop.wall_s`, and only then says that the run is finished."""
    run = make(StopOptions(wall_s=50.0))
    assert run.machine.next_deadline() == 50.0
    run.wait(49.0)
    assert run.view.finished is None
    run.wait(1.0)
    assert run.view.finished == "v0@r0"
    assert run.machine.next_deadline() == inf


def test_the_run_ends_when_the_last_of_its_data_is_gated() -> None:
    """That settles it, too: no round will make another version."""
    run = ScriptedRun(replace(OPTIONS, data=DataOptions(ranges=1)))
    run.train("a")
    run.ask(RangesRequested(0, "a", run.inc("a"), 1, 1))
    run.finite = False
    assert run.outcome(run.push("a", ranges=(0,))).kind == "gated"
    assert run.view.finished == "v0@r0"


def test_the_last_version_leaves_nobody_waiting() -> None:
    """A push that was committed while it was written waits for a round that never comes: it is skipped."""
    run = make(StopOptions(versions=1))
    run.train("b")
    run.held = {Persist}
    last = run.push("a")
    run.wait(11.0)
    late = run.push("b")
    run.held.clear()
    run.answer()
    assert run.view.finished == "v1@r1" and run.outcome(last).kind == "accepted"
    assert run.outcome(late).kind == "skipped"


def test_a_run_without_data_is_finished_where_it_went_back_to() -> None:
    """What the undone version had trained is leased to nobody again: no cluster could finish it."""
    run = ScriptedRun(replace(OPTIONS, data=DataOptions(ranges=2)))
    run.train("a")
    run.ask(RangesRequested(0, "a", run.inc("a"), 1, 2))
    for number in (0, 1):
        run.outcome(run.push("a", ranges=(number,)))
    assert run.view.finished == "v2@r2"
    run.ask(RollbackAsked(0, VersionId(1, 1)))
    run.ask(SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 0, run.head, None, (VersionId(1, 1), run.head), 4, ""))
    assert run.head == VersionId(1, 1) and run.ask(RangesRequested(0, "a", run.inc("a"), 2, 1)) == Finished(run.head)
