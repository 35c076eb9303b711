"""Days at the failure rates of the paper's Table 1 (§5.4): what was durable stays, and each cluster pays for itself."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import play_month
from tests.simulation.month import TABLE_1


def test_the_table_is_the_papers() -> None:
    """9 clusters of 10,112 devices; A and B were there all the time, C, D and E for 29, 6 and 28 days."""
    assert sum(kind.clusters for kind in TABLE_1) == 9
    assert sum(kind.clusters * kind.devices for kind in TABLE_1) == 10_112
    assert [round(33 * kind.active, 1) for kind in TABLE_1] == [33.0, 33.0, 29.2, 6.0, 27.9]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_day_costs_each_cluster_its_own_failures_only() -> None:
    """Guards 3 and 9 with 9 clusters and 16 slaves, while clusters, slaves and the master fail."""
    month, wrong = play_month(1.0, seed=1)
    assert not wrong, wrong
    assert month.notes["version_committed"] > 30
    assert month.kinds["a slave"] + month.kinds["the master"] == 2
    assert sum(month.kinds.values()) >= 6
    assert all(month.lost_work(m.name) == {} for m in month.members if m.failures == 0 and m.ends >= month.lasts_s)
    assert "availability" in month.format_figures()
