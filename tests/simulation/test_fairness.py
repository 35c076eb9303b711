"""Twelve fast clusters and a slow one share two slots: all wait about as long (docs/rationale.md#31).

Real Coordinator, ledger, shards and agents in the simulated world, all invariants on, no faults.
"""

from __future__ import annotations

from statistics import mean

import pytest

from dips.protocol.options import DataOptions, Options, PenaltyOptions, TimingOptions
from dips.sim.scenario import ClusterShape, Scenario, name_clusters
from dips.sim.world import World
from tests.simulation.drawn import crowd_of
from tests.simulation.fairness import QueueInvariant
from tests.simulation.sabotage import SABOTAGES, sabotaged
from tests.simulation.trial import Failure, SeedTrial, Trial

FAST, SLOW_STEP_S, LASTS_S = 12, 20.0, 1800.0
SLOW = name_clusters(FAST + 1)[FAST]
MOST = 2.0  # times the mean
SEEDS = 20
CROWDS, QUICK_CROWDS = 5, 1


def lived(seed: int) -> tuple[QueueInvariant, Failure | None]:
    """Play one run: pushes of about 5 s, so that both slots are always in use."""
    timing = TimingOptions(
        heartbeat_s=1.5, lease_heartbeats=5, hang_s=60.0, order_s=4.0, compute_s=8.0, transfer_s=600.0,
        least_transfer_s=10.0,
    )  # fmt: skip
    options = Options(penalty=PenaltyOptions(gates=()), data=DataOptions(ranges=100_000), timing=timing)
    shapes = [ClusterShape(1, 3.0, 20.0)] * FAST + [ClusterShape(1, SLOW_STEP_S, 20.0)]
    scenario = Scenario(
        tuple(shapes), slaves=1, layers=1, slots=2, pinned=1, inner_steps=3, options=options, lasts_s=LASTS_S
    )
    trial = Trial(World(seed, scenario), patience=20.0)
    failure = trial.run().failure
    return trial.queue, failure


def ratio_of_slow(queue: QueueInvariant) -> float:
    """Its mean wait over that of all clusters."""
    waits: dict[str, list[float]] = {}
    for name, waited_s in queue.waited():
        waits.setdefault(name, []).append(waited_s)
    assert len(waits) == FAST + 1 and all(len(times) >= 5 for times in waits.values()), waits
    return mean(waits[SLOW]) / mean(mean(times) for times in waits.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_slow_cluster_waits_at_most_twice_the_mean(seed: int) -> None:
    """In thirty minutes; the mean is that of all thirteen."""
    queue, failure = lived(seed)
    assert failure is None, failure.what
    assert ratio_of_slow(queue) <= MOST


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.slow] * (s >= QUICK_CROWDS)) for s in range(CROWDS)]
)
def test_places_survive_faults(seed: int) -> None:
    """Six to nine clusters and one slot while everything fails in turn: whoever asks later goes behind."""
    failure = SeedTrial(seed, crowd_of(seed)).run().failure
    assert failure is None, failure.what


def test_without_the_queue_a_slow_cluster_starves() -> None:
    """The scenario bites: with slots for whoever asks in time, the invariant breaks within the first minutes."""
    with sabotaged("drop-queue"):
        _, failure = lived(0)
    assert failure is not None and failure.number in SABOTAGES["drop-queue"].found_by
