"""A cluster whose frozen parameters are not those of the others is refused by name: adapters belong to one base."""

from __future__ import annotations

from typing import Any

import pytest

from dips.errors import ConfigError
from dips.ids import GENESIS
from dips.master.ledger import MEMORY, Ledger
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Failed, Joined
from dips.protocol.records import IncarnationGiven
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun


def join(run: ScriptedRun, cluster: str, base: str, nonce: str = "n", former: int = 0) -> Any:
    joined = ev.ClusterJoined(0, cluster, nonce, "r", run.manifest.digest, "c", former=former, frozen_digest=base)
    return run.ask(joined)


def test_a_cluster_on_another_base_is_refused() -> None:
    """With both names; the same base, or one that is not known, is welcome."""
    run = ScriptedRun()
    assert isinstance(join(run, "a", "base one"), Joined)
    refused = join(run, "b", "base two")
    assert isinstance(refused, Failed) and refused.error is ConfigError
    assert "frozen parameters of b: expected digest base one, as a has, got base two" in refused.message
    assert isinstance(join(run, "b", "base one"), Joined) and isinstance(join(run, "c", ""), Joined)


@pytest.mark.parametrize("others", [False, True])
def test_a_base_is_changed_by_whoever_is_alone(others: bool) -> None:
    """A cluster that begins anew is not held against itself, nor against one that has left."""
    run = ScriptedRun()
    inc = join(run, "a", "base one").inc
    join(run, "b", "base one")
    if not others:
        run.ask(ev.ClusterLeft(0, "b", run.inc("b"), 0, "done"))
    again = join(run, "a", "base two", "m", former=inc)
    assert isinstance(again, Failed if others else Joined)


@pytest.mark.parametrize("protocol", [1, 2])
def test_the_next_master_knows_who_has_which_base(protocol: int) -> None:
    """From the ledger, since clusters do not join again for it; a run that speaks protocol 1 has no place for it."""
    run = ScriptedRun(protocol=protocol)
    join(run, "a", "base one")
    ledger = Ledger.create(MEMORY, run.first.row)
    ledger.write_records(run.all_of(IncarnationGiven))
    run.machine = Coordinator(ledger.read_state(), run.manifest, OPTIONS, run.now)
    ledger.close()
    run.ask(ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 0, GENESIS, None, (), 4, ""))
    assert isinstance(join(run, "b", "base two"), Failed if protocol == 2 else Joined)
