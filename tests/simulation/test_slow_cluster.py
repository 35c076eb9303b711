"""A cluster at 1/30 of the others' bandwidth takes part, and the others hardly notice (docs/rationale.md#19, #24, #31).

The real Coordinator, ledger and shards in the simulated world, all invariants on; no faults, since what is shown is
what slowness alone costs.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

import pytest

from dips.protocol.effects import Outcome
from dips.protocol.options import DataOptions, Options, PenaltyOptions, TimingOptions
from dips.protocol.transfer_book import Bandwidth
from dips.sim.agent import SimAgent
from dips.sim.observer import Observer
from dips.sim.scenario import ClusterShape, Scenario
from dips.sim.work import Frozen
from dips.sim.world import World
from tests.simulation.trial import Trial

pytestmark = pytest.mark.slow  # half a minute of a core

SLOWNESS = 30.0
LINK = 2.5  # times slower than the links of the seeds: a transfer of the slow one takes longer than its inner steps
LASTS_S = 800.0


class Diary(Observer):
    """When clusters got an Outcome, at which attempt their pulls succeeded, and how many transfers failed."""

    def __init__(self) -> None:
        self.outcomes: dict[str, list[float]] = {}
        self.kinds: dict[str, list[str]] = {}
        self.attempts: dict[str, list[int]] = {}
        self.failed: dict[str, int] = {}

    def outcome_received(self, agent: SimAgent, frozen: Frozen, outcome: Outcome) -> None:
        self.outcomes.setdefault(agent.name, []).append(agent.world.heap.now)
        self.kinds.setdefault(agent.name, []).append(outcome.kind)

    def pull_ended(self, agent: SimAgent, installed: bool, attempt: int) -> None:
        if installed:
            self.attempts.setdefault(agent.name, []).append(attempt)
        else:
            self.failed[agent.name] = self.failed.get(agent.name, 0) + 1

    def round_s(self, cluster: str) -> float:
        """Mean seconds from one Outcome to the next."""
        times = self.outcomes[cluster]
        return mean(b - a for a, b in pairwise(times))


def lived(seed: int, clusters: int, slots: int, pinned: int, window_s: float | None = None) -> tuple[Diary, World]:
    """Play one run of two fast clusters and, with `clusters` 3, a slow one."""
    diary = Diary()
    timing = TimingOptions(
        window_s=window_s, heartbeat_s=1.5, lease_heartbeats=5, hang_s=12.0, order_s=4.0,
        compute_s=8.0, transfer_s=600.0,
        least_transfer_s=10.0, busy_retry_s=0.7,
    )  # fmt: skip
    options = Options(penalty=PenaltyOptions(gates=()), data=DataOptions(ranges=20_000), timing=timing)
    shapes = [ClusterShape(2, 0.5, slowness) for slowness in (LINK, LINK, LINK * SLOWNESS)]
    scenario = Scenario(
        tuple(shapes[:clusters]), slaves=2, layers=4, slots=slots, pinned=pinned, inner_steps=40, options=options,
        lasts_s=LASTS_S,
    )  # fmt: skip
    world = World(seed, scenario)
    result = Trial(world, patience=8.0).run([diary])
    assert result.failure is None, f"seed {seed}: {result.failure.what}"
    return diary, world


def others_round_s(diary: Diary) -> float:
    return mean(diary.round_s(cluster) for cluster in "ab")


@pytest.mark.parametrize("pinned", range(2))
@pytest.mark.parametrize("seed", range(4))
def test_a_slow_cluster_takes_part_and_costs_the_others_a_tenth_at_most(seed: int, pinned: int) -> None:
    """Every pull succeeds at most at its second attempt; one commit in three transfer times; 10 % for the others.

    With two slots, one of which the slow push holds nearly half of the time.
    """
    alone, _ = lived(seed, 2, 2, pinned)
    diary, world = lived(seed, 3, 2, pinned)
    assert max(diary.attempts["c"]) <= 2
    transfer_s = mean(m.ended - m.began for m in world.data.meters["c"] if m.ended is not None)
    assert transfer_s > 0.8 * SLOWNESS * mean(m.ended - m.began for m in world.data.meters["a"] if m.ended is not None)
    assert diary.round_s("c") <= 3 * transfer_s
    assert diary.kinds["c"].count("accepted") == len(diary.kinds["c"]) >= 8
    assert others_round_s(diary) <= 1.10 * others_round_s(alone)


def test_without_a_measured_bandwidth_the_others_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario bites: a master that does not know how slow the link is keeps every window of its push open."""
    alone, _ = lived(2, 2, 2, 1, window_s=8.0)
    diary, _ = lived(2, 3, 2, 1, window_s=8.0)
    assert others_round_s(diary) <= 1.10 * others_round_s(alone)
    monkeypatch.setattr(Bandwidth, "measure_rate", lambda self, bytes_per_s: None)
    blind, _ = lived(2, 3, 2, 1, window_s=8.0)
    assert others_round_s(blind) > 1.10 * others_round_s(alone)
