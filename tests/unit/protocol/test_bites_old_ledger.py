"""A slave that holds what this ledger does not know shows that the ledger is an old copy: the master stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.ids import VersionId
from dips.protocol import events as ev
from dips.protocol.effects import Exit, Failed
from dips.protocol.run_state import RunState
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun


def registers(run: ScriptedRun, term: int = 0, *complete: VersionId) -> object:
    return run.ask(ev.SlaveRegistered(0, "s", "n2", "r", "s:1", ("s:2",), term, None, None, complete, 4, ""))


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_snapshot_of_a_round_that_was_never_reserved_stops_the_master(beyond: int) -> None:
    """The very next round is one too many: its number would be given twice."""
    run = ScriptedRun()
    run.train("a")
    run.outcome(run.push("a"))  # round 1; the next is 2
    assert isinstance(registers(run, 0, VersionId(2, 2 + beyond)), Failed)
    assert [e.code for e in run.all_of(Exit)] == [78]


def test_a_snapshot_that_was_never_committed_does_not() -> None:
    """A round that was reserved may have left one that has no row."""
    run = ScriptedRun()
    run.train("a")
    run.outcome(run.push("a"))
    assert not isinstance(registers(run, 0, VersionId(2, 1)), Failed)
    assert run.all_of(Exit) == []


@pytest.mark.parametrize(("number", "stops"), [(4, False), (5, True), (6, True), (7, False), (9, True), (10, False)])
def test_a_snapshot_of_any_gap_stops_the_master(number: int, stops: bool) -> None:
    """The ledger was restored twice: what the first copy lacked, the second one lacks too."""
    run = ScriptedRun()
    state = run.machine.capture_state()
    assert isinstance(state, RunState)
    state.unknown_rounds, state.next_round = ((5, 7), (9, 10)), 11
    assert isinstance(registers(run, 0, VersionId(4, number)), Failed) is stops
    assert [e.code for e in run.all_of(Exit)] == ([78] if stops else [])


def test_the_next_term_stops_the_master() -> None:
    """Its successor has begun."""
    run = ScriptedRun()
    registers(run, 2)
    assert [e.code for e in run.all_of(Exit)] == [75]


@pytest.mark.parametrize("waited", [0.0, OPTIONS.timing.lease_s - 0.1, OPTIONS.timing.lease_s])
def test_after_a_lease_those_slaves_that_came_prove_a_ledger(waited: float) -> None:
    """Of a later term than the first, while one of them is away: not a moment earlier, and no later."""
    run = ScriptedRun()
    state = run.machine.capture_state()
    assert isinstance(state, RunState)
    state.term, state.slaves["t"] = 2, replace(state.slaves["s"], name="t")
    state.roster.unregistered["t"] = None
    state.now = state.started + waited
    assert state.is_proven is (waited == OPTIONS.timing.lease_s)
