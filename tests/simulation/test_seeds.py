"""Many seeds of the simulated world: every invariant after every event (docs/architecture.md#invariants)."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

import pytest

from dips.sim import disk
from tests.simulation.__main__ import covered, play_all, report, spread
from tests.simulation.coverage import WAYS
from tests.simulation.trial import SeedTrial, play

SEEDS = int(os.environ.get("DIPS_SEEDS", "6"))  # `make sim` plays 1,000, CI 500, which must meet every row
CROSSING = 237  # restores a ledger beside a WAL, finds two disks swapped: the first seeds do neither


@pytest.mark.timeout(540)
def test_every_invariant_holds_on_every_seed() -> None:
    """Guards 1 to 12: whatever crashes, stops, parts, fills up, rots or is put back, nothing ever goes wrong for good.

    Each seed is a run worth the name, and a third of them runs each of the ways.
    """
    results = list(play_all([*range(SEEDS), CROSSING], jobs=2))
    failed = [report(r) for r in results if r.failure]
    assert not failed, f"{len(failed)} of {len(results)} seeds failed\n\n" + "\n\n".join(failed[:3])
    least = {"events": 300, "completed rounds (not skipped)": 5, "faults": 3}
    medians = {"events": 1500, "completed rounds (not skipped)": 20, "faults": 10}
    found = spread(results)
    assert {what: min(found[what]) for what in least if min(found[what]) < least[what]} == {}
    assert {what: median(found[what]) for what in medians if median(found[what]) < medians[what]} == {}
    met = covered(results)
    assert {way: met[way] for way in WAYS if met[way] < len(results) / 3} == {}


@pytest.mark.parametrize("game", ["swarm", "core"])
def test_every_invariant_holds_where_faults_are_drawn_and_where_the_dead_stay_dead(game: str) -> None:
    """A few of each: `make sim ARGS=--swarm` and `ARGS=--core` play as many as one likes."""
    failed = [report(r, game=game) for r in play_all(range(SEEDS // 3), jobs=2, game=game) if r.failure]
    assert not failed, "\n\n".join(failed[:3])


def test_every_invariant_holds_if_nothing_is_read_before_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every snapshot is an archive: a rollback has to ask for each, rotten ones are found late."""
    monkeypatch.setattr(disk, "READ_AT_START", 0)
    failed = [report(r) for r in play_all(range(SEEDS // 3), jobs=2) if r.failure]
    assert not failed, "\n\n".join(failed[:3])


def test_a_seed_is_a_whole_description() -> None:
    """The same seed gives the same events and the same bytes; another seed another run. These two are short."""
    trials = [SeedTrial(21), SeedTrial(21), SeedTrial(10)]
    for trial in trials:
        trial.run()
    assert trials[0].digest() == trials[1].digest() != trials[2].digest()


@pytest.mark.slow
def test_a_seed_does_not_depend_on_the_hashing_of_strings() -> None:
    """Another process with another PYTHONHASHSEED plays the same run: no set is iterated where order matters."""
    command = [
        sys.executable,
        "-c",
        "from tests.simulation.trial import *; t = SeedTrial(5); t.run(); print(t.digest())",
    ]
    outputs = []
    for hashing in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashing}
        outputs.append(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)
    assert outputs[0] == outputs[1] != ""


def test_a_failing_seed_says_how_to_play_it_again() -> None:
    """The report of a failing seed holds the invariant, the last events and the command that repeats it."""
    result = play((0, "flip-on-prepared"))
    text = report(result, "flip-on-prepared")
    assert "[2] CommitInvariant" in text
    assert "python -m tests.simulation --seed 0 --sabotage flip-on-prepared" in text
    assert len(result.failure.trace if result.failure else ()) == 40
