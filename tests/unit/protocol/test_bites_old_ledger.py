"""A slave that holds what this ledger does not know shows that the ledger is an old copy: the master stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.errors import StaleVersion
from dips.ids import VersionId
from dips.protocol import events as ev
from dips.protocol.effects import Exit, Failed, Pending
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


@pytest.mark.parametrize("lost", [VersionId(9, 2), VersionId(8, 2), VersionId(2, 2), VersionId(1, 2)])
def test_a_base_that_the_restored_copy_lacked_is_refused_for_good(lost: VersionId) -> None:
    """A checkpoint of before may have it, with a number of settled pushes that the cluster reaches once more: its work
    stands on a θ that is gone. Also when the lineage has come so far that the rows of its time are no longer in memory.
    """
    run = ScriptedRun(replace(OPTIONS, lineage_kept=3))
    state = run.machine.capture_state()
    assert isinstance(state, RunState)
    state.unknown_rounds, state.next_round = ((1, 3),), 3
    run.train("a")
    for _ in range(8):
        push = run.push("a")
        run.wait(11.0)
        run.outcome(push)
    assert run.head.version == 8 and len(state.versions) == 4
    refused = run.ask(ev.PushRequested(0, run.next_push("a"), lost, 1))
    assert isinstance(refused, Failed) and refused.error is StaleVersion and "pull the head first" in refused.message
    assert isinstance(run.ask(ev.PushRequested(0, run.next_push("a"), VersionId(1, 3), 1)), Pending)


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
