"""A rank that dies at any of twenty moments of a push, and of a pull, loses its own work and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.deployment import Deployment
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
    with Deployment(tmp_path, loop, clusters=("east", "west", "north")) as deployment:
        deployment.start_servers()
        deployment.cluster("north")
        deployment.cluster("east", words=("--die", "push"))
        deployment.cluster("west", words=("--die", "pull"))
        for name, kind in (("east", "push"), ("west", "pull")):
            names = POINTS[kind]
            deployment.until(
                lambda name=name, names=names: _died(deployment, name) == names, WITHIN_S, f"{name} died 20 times"
            )
            deployment.count_kill(name, len(names))
        deployment.progress(3, by=deployment.clusters)
        deployment.check()
        for name in ("east", "west"):
            assert len(deployment.marks(deployment.timeline(name), "joined")) == 1
            assert len(deployment.marks(deployment.timeline(name), "trainer_attached")) == 21
        assert not deployment.marks(deployment.master_timeline, "cluster_gone")
        assert not deployment.marks(deployment.master_timeline, "slave_lost")


def _died(deployment: Deployment, name: str) -> list[str]:
    path = deployment.directory / f"{name}.died"
    return path.read_text().splitlines() if path.exists() else []
