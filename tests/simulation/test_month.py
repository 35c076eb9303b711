"""Days at the failure rates of the paper's Table 1 (§5.4): what was durable stays, and each cluster pays for itself."""

from __future__ import annotations

from collections import Counter

import pytest

from dips.commands.simulate import find_scenario
from dips.study.sized_run import ClusterPhase, count_lost, make_world, read_scenario
from tests.simulation.trial import Trial

FAILURES = {"A": 1, "B": 0, "C": 1, "D": 1, "E": 3}  # of all clusters of a kind, in a day
PATIENCE = 1200.0  # times the bounds of Liveness, which are of steps of a tenth of a second


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_day_costs_each_cluster_its_own_failures_only() -> None:
    """Every invariant with 9 clusters and 16 slaves, while clusters, slaves and the master fail; a failure costs the
    work of two pushes at most.
    """
    month = read_scenario(find_scenario("month"))
    whole = {"joins": 0.0, "leaves": 1.0}
    kinds = tuple(kind.model_copy(update={"failures": FAILURES[kind.name], **whole}) for kind in month.clusters)
    day = month.model_copy(update={"hours": 24.0, "slave_failures": 1, "clusters": kinds})
    world, watch, failures = make_world(day)
    result = Trial(world, PATIENCE).run([watch, failures], failures.plan)
    assert result.failure is None, result.failure
    assert result.versions >= 8 and failures.kinds["a slave"] == failures.kinds["the master"] == 1
    failed = Counter(span.cluster for span in watch.spans if span.phase is ClusterPhase.DOWN)
    assert failed.total() == sum(FAILURES.values())
    lost = count_lost(world)
    assert lost and all(steps <= 2 * month.inner_steps * failed[cluster] for cluster, steps in lost.items()), lost
