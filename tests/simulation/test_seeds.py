"""Many seeds of the simulated world: every invariant after every event (protocol.md section 4)."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

import pytest

from dips.sim.__main__ import play, play_all, report
from dips.sim.world import World, digest

SEEDS = int(os.environ.get("DIPS_SEEDS", "300"))


@pytest.mark.timeout(540)
def test_every_invariant_holds_on_every_seed() -> None:
    """Guards 1 to 12: with crashes of everybody, loss, delay, doubling and reordering nothing ever goes wrong for good.

    Each seed is a run worth the name, with rounds and faults, and every kind of ending occurs in some of them.
    """
    results = list(play_all(range(SEEDS), jobs=2))
    failed = [report(r) for r in results if r.failure]
    assert not failed, f"{len(failed)} of {SEEDS} seeds failed\n\n" + "\n\n".join(failed[:3])
    assert median(r.rounds for r in results) >= 5
    assert min(r.faults for r in results) >= 3
    told = {kind for r in results for kind in r.kinds}
    assert {
        "round_skipped",
        "round_unchanged",
        "push_gated",
        "push_dropped",
        "slave_lost",
        "cluster_gone",
        "blind",
    } <= told


def test_a_seed_is_a_whole_description() -> None:
    """The same seed gives the same events and the same bytes; another seed another run."""
    worlds = [World(7), World(7), World(8)]
    for world in worlds:
        world.run()
    assert digest(worlds[0]) == digest(worlds[1]) != digest(worlds[2])


def test_a_seed_does_not_depend_on_the_hashing_of_strings() -> None:
    """Another process with another PYTHONHASHSEED plays the same run: no set is iterated where order matters."""
    command = [sys.executable, "-c", "from dips.sim.world import *; w = World(5); w.run(); print(digest(w))"]
    told = []
    for hashing in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashing}
        told.append(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)
    assert told[0] == told[1] != ""


def test_a_failing_seed_says_how_to_play_it_again() -> None:
    """The report of a failing seed holds the invariant, the last events and the command that repeats it."""
    result = play((0, "flip-on-prepared"))
    text = report(result, "flip-on-prepared")
    assert "[2] Commit" in text
    assert "python -m dips.sim --seed 0 --sabotage flip-on-prepared" in text
    assert len(result.failure.trace if result.failure else ()) == 40
