"""The lineage in memory is bounded by `lineage_kept`, 3 here: a run that is longer restarts, and rolls back."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from dips.errors import ConfigError
from dips.ids import GENESIS, VersionId
from dips.master.ledger import MEMORY, Ledger
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.options import LINEAGE_KEPT
from dips.protocol.records import Record, RunRow
from dips.protocol.run_state import RunState
from tests.unit.protocol.scripted_run import MANIFEST, OPTIONS, ScriptedRun

BOUND = 3
SHORT = replace(OPTIONS, lineage_kept=BOUND)
ROW = RunRow("r", "c", MANIFEST.to_json(), (("s", (0,)),), ("0" * 32,), (100.0,))


def long_run(versions: int) -> ScriptedRun:
    run = ScriptedRun(SHORT)
    run.train("a")
    for _ in range(versions):
        run.outcome(run.push("a"))
    return run


def restart_master(run: ScriptedRun) -> None:
    """The next master of this run: it knows what a ledger says of every record so far, and nothing else."""
    ledger = Ledger.create(MEMORY, ROW)
    ledger.write_records([e for e in run.effects if isinstance(e, get_args(Record))])
    ledger.start_term()
    run.machine = Coordinator(ledger.read_state(), MANIFEST, SHORT, run.now)
    ledger.close()


def lineage(run: ScriptedRun) -> list[VersionId]:
    state = run.machine.capture_state()
    assert isinstance(state, RunState)
    return list(state.versions)


@pytest.mark.parametrize("versions", [BOUND - 1, BOUND, BOUND + 1, 3 * BOUND])
def test_a_run_of_any_length_restarts(versions: int) -> None:
    """As the next master reads it, the lineage is what the one before held of it."""
    run = long_run(versions)
    before, tokens = lineage(run), run.view.progress.tokens
    restart_master(run)
    assert run.head == VersionId(versions, versions) == before[-1]
    assert lineage(run) == before and len(before) <= BOUND + 1
    assert before[0] == GENESIS
    assert run.view.progress.tokens == tokens == 100 * versions


def test_a_restarted_long_run_goes_on() -> None:
    """Its next version is one above, and the bound holds as before."""
    run = long_run(2 * BOUND)
    restart_master(run)
    run.ask(ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 1, run.head, None, (run.head,), 4, ""))
    run.train("a", process="p2")
    assert run.outcome(run.push("a")).kind == "accepted"
    assert run.head.version == 2 * BOUND + 1
    assert len(lineage(run)) == BOUND + 1


def test_a_restarted_long_run_rolls_back() -> None:
    """To the newest version that its slave offers, the last but one of the two that no disk has deleted."""
    run = long_run(2 * BOUND)
    restart_master(run)
    offered = VersionId(2 * BOUND - 1, 2 * BOUND - 1)
    run.ask(ev.SlaveRegistered(0, "s", "n2", "r", "s:1", ("s:2",), 0, None, None, (offered,), 4, ""))
    assert run.head == offered == lineage(run)[-1]
    assert run.view.progress.tokens == 100 * offered.version
    restart_master(run)
    assert run.head == offered


def test_no_file_sets_the_bound() -> None:
    """What users run has the constant; tests and the simulation may take less, down to one version."""
    assert OPTIONS.lineage_kept == LINEAGE_KEPT
    with pytest.raises(ConfigError, match="lineage_kept: expected at least 1, got 0"):
        replace(OPTIONS, lineage_kept=0)
