"""The master's metrics: where each number stands, and what is counted from a view."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from dips.master.meters import RoundMeters
from dips.protocol.heartbeats import Transfer
from dips.protocol.view import ClusterView, NewestView, RunView, SlaveView
from dips.telemetry.metrics import MetricRow
from dips.view import prometheus
from dips.view.prometheus import count_standings
from tests.unit.view.views import make_cluster, make_run


def test_clusters_are_counted_by_what_they_can_and_did() -> None:
    """A lease; a trainer that trains and may push; a part in the newest version, if there is one."""
    clusters = {
        "a": make_cluster(),
        "b": make_cluster("idle", "stalled", trainer="dead"),
        "c": make_cluster(quarantined=True),
        "d": make_cluster("gone", "left"),
        "e": make_cluster("idle", "stalled", trainer="starting"),
    }
    assert count_standings(make_run(clusters)) == {"live": 4, "participating": 1, "contributing": 0}
    assert count_standings(make_run(clusters, newest=NewestView(clusters=2)))["contributing"] == 2


OF: dict[Any, tuple[MetricRow, ...]] = {
    RunView: prometheus.RUN,
    ClusterView: prometheus.CLUSTER,
    SlaveView: prometheus.SLAVE,
    Transfer: prometheus.TRANSFER,
}


@pytest.mark.parametrize(("cls", "row"), [(cls, row) for cls, rows in OF.items() for row in rows])
def test_every_metric_stands_somewhere(cls: Any, row: MetricRow) -> None:
    """A path that is misspelt would be a metric without a sample."""
    where: Any = cls
    if row.path.startswith("meters."):
        assert hasattr(RoundMeters(), row.path.removeprefix("meters."))
        return
    for name in row.path.split("."):
        where = next((h for h in get_args(where) if dataclasses.is_dataclass(h)), where)
        known = get_type_hints(where) | {n: get_type_hints(p.fget).get("return") for n, p in _properties(where)}
        assert name in known, f"{row.name}: {where.__name__} has no {name}"
        where = known[name]


def _properties(cls: Any) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in vars(cls).items() if isinstance(p, property)]
