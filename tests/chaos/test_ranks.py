"""A rank that dies at any of twenty moments of a push, and of a pull, loses its own work and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.house import Deployment
from tests.chaos.points import POINTS
from tests.chaos.wires import Loop

WITHIN_S = 240


@pytest.mark.timeout(400)
def test_a_rank_killed_at_twenty_points_of_a_push_and_of_a_pull(tmp_path: Path, loop: Loop) -> None:
    """Each incarnation of east's trainer dies at the next point of its first push, of west's at the next of its first
    pull.

    north meanwhile goes on; the agents keep their leases, so there is one incarnation of each; every incarnation pulls
    anew.
    """
    with Deployment(tmp_path, loop, clusters=("east", "west", "north")) as house:
        house.start_master()
        house.start_slaves()
        house.cluster("north")
        house.cluster("east", words=("--die", "push"))
        house.cluster("west", words=("--die", "pull"))
        for name, kind in (("east", "push"), ("west", "pull")):
            names = POINTS[kind]
            house.until(lambda name=name, names=names: _died(house, name) == names, WITHIN_S, f"{name} died 20 times")
            house.count_kill(name, len(names))
        house.progress(3, by=house.clusters)
        house.check()
        for name in ("east", "west"):
            assert len(house.marks(house.timeline(name), "joined")) == 1
            assert len(house.marks(house.timeline(name), "trainer_attached")) == 21
        assert not house.marks(house.master_timeline, "cluster_gone")
        assert not house.marks(house.master_timeline, "slave_lost")


def _died(house: Deployment, name: str) -> list[str]:
    path = house.directory / f"{name}.died"
    return path.read_text().splitlines() if path.exists() else []
