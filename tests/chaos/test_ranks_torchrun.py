"""Either rank of two dies at any moment of a push or a pull: torchrun's restarts mend it, and nobody else notices."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chaos.deployment import DEADLINES, Deployment
from tests.chaos.points import deaths
from tests.chaos.train_chaos import RESTARTS
from tests.chaos.wires import Loop

RANKS = 2
DEADLINE_S = DEADLINES["transfer_s"]  # of a push or pull; nothing that waits for a dead rank may last longer
WITHIN_S = 420


@pytest.mark.timeout(600)
def test_each_of_two_ranks_dies_at_every_point(tmp_path: Path, loop: Loop) -> None:
    """east's ranks die in turn at the points of a push, west's at those of a pull; twenty deaths end a torchrun.

    north pushes all the while, and no round of its waits for the dead; every version that any rank installed is the
    reference's number, also on the rank that was not killed; there is one incarnation of each cluster.
    """
    with Deployment(tmp_path, loop, clusters=("east", "west", "north")) as deployment:
        deployment.start_servers()
        deployment.cluster("north")
        deployment.progress(2, by=("north",), within_s=90)
        for name, kind in (("east", "push"), ("west", "pull")):
            deployment.cluster(name, words=("--ranks", str(RANKS), "--die", kind))
        for name, kind in (("east", "push"), ("west", "pull")):
            planned = deaths(kind, RANKS)
            deployment.until(
                lambda name=name, n=len(planned): len(_died(deployment, name)) >= n, WITHIN_S, f"{name}: {planned}"
            )
            assert _died(deployment, name) == planned
            deployment.count_kill(name, len(planned))
            deployment.seen_after(deployment.timeline(name), "trainer_attached", len(planned) + 1)
        deployment.progress(3, by=deployment.clusters)
        deployment.check()
        for name, kind in (("east", "push"), ("west", "pull")):
            assert len(deployment.marks(deployment.timeline(name), "joined")) == 1
            lives = deployment.marks(deployment.timeline(name), "trainer_attached")
            assert len(lives) == len(deaths(kind, RANKS)) + 1
            assert {incarnation["restart"] for incarnation in lives} == set(range(RESTARTS + 1))
            assert _restarting(deployment, name) < DEADLINE_S
        assert _pushless(deployment, "north") < DEADLINE_S
        assert not deployment.marks(deployment.master_timeline, "cluster_gone")
        assert not deployment.marks(deployment.master_timeline, "slave_lost")
        sys.stdout.write(
            f"north was {_pushless(deployment, 'north'):.1f} s without a push; from a death to the next incarnation "
            f"it took east {_restarting(deployment, 'east'):.1f} s, west {_restarting(deployment, 'west'):.1f} s\n"
        )


def _died(deployment: Deployment, name: str) -> list[str]:
    path = deployment.directory / f"{name}.died"
    return path.read_text().splitlines() if path.exists() else []


def _pushless(deployment: Deployment, name: str) -> float:
    """The longest time between two pushes of a cluster, in seconds."""
    at = [line["at"] for line in deployment.marks(deployment.timeline(name), "push_end", ok=True)]
    return max(later - earlier for earlier, later in pairwise(at))


def _restarting(deployment: Deployment, name: str) -> float:
    """The longest time between two incarnations that one torchrun started: neither its own end nor its start is in
    it.
    """
    lives = deployment.marks(deployment.timeline(name), "trainer_attached")
    return max(later["at"] - incarnation["at"] for incarnation, later in pairwise(lives) if later["restart"])
