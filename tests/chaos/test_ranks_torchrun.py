"""Either rank of two dies at any moment of a push or a pull: torchrun's restarts mend it, and nobody else notices."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chaos.house import TIMING, House
from tests.chaos.points import deaths
from tests.chaos.train_chaos import RESTARTS
from tests.chaos.wires import Loop

RANKS = 2
DEADLINE_S = TIMING["transfer_s"]  # of a push or pull; nothing that waits for a dead rank may last longer
WITHIN_S = 420


@pytest.mark.timeout(600)
def test_each_of_two_ranks_dies_at_every_point(tmp_path: Path, loop: Loop) -> None:
    """east's ranks die in turn at the points of a push, west's at those of a pull; twenty deaths end a torchrun.

    north pushes all the while, and no round of its waits for the dead; every version that any rank installed is the
    twin's number, also on the rank that was not killed; there is one incarnation of each cluster.
    """
    with House(tmp_path, loop, clusters=("east", "west", "north")) as house:
        house.start_master()
        house.start_slaves()
        house.cluster("north")
        house.progress(2, by=("north",), within_s=90)
        for name, kind in (("east", "push"), ("west", "pull")):
            house.cluster(name, words=("--ranks", str(RANKS), "--die", kind))
        for name, kind in (("east", "push"), ("west", "pull")):
            planned = deaths(kind, RANKS)
            house.until(lambda name=name, n=len(planned): len(_died(house, name)) >= n, WITHIN_S, f"{name}: {planned}")
            assert _died(house, name) == planned
            house.count_kill(name, len(planned))
        house.progress(3, by=house.clusters)
        house.check()
        for name, kind in (("east", "push"), ("west", "pull")):
            assert len(house.marks(house.timeline(name), "joined")) == 1
            lives = house.marks(house.timeline(name), "trainer_attached")
            assert len(lives) == len(deaths(kind, RANKS)) + 1
            assert {life["restart"] for life in lives} == set(range(RESTARTS + 1))
            assert _longest(house, name, "trainer_attached") < DEADLINE_S
        assert _longest(house, "north", "push_end") < DEADLINE_S
        assert not house.marks(house.master_timeline, "cluster_gone")
        assert not house.marks(house.master_timeline, "slave_lost")
        sys.stdout.write(
            "longest without a push of north: {:.1f} s; without a life of east: {:.1f} s, of west: {:.1f} s\n".format(
                *(_longest(house, *of) for of in (
                    ("north", "push_end"), ("east", "trainer_attached"), ("west", "trainer_attached"),
                ))
            )
        )  # fmt: skip


def _died(house: House, name: str) -> list[str]:
    path = house.directory / f"{name}.died"
    return path.read_text().splitlines() if path.exists() else []


def _longest(house: House, name: str, kind: str) -> float:
    """The longest time between two such lines of a cluster's timeline."""
    at = [line["at"] for line in house.marks(house.timeline(name), kind)]
    return max(later - earlier for earlier, later in pairwise(at))
