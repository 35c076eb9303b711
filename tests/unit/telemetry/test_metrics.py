"""Metrics say what the status says, in the words of Prometheus."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from dips.client.agent import metrics as agent_metrics
from dips.master.meters import RoundMeters
from dips.protocol.enums import ClusterState
from dips.protocol.heartbeats import Transfer
from dips.protocol.view import LeaseView, NewestView, ProgressView, RoundCounts
from dips.slave import metrics as slave_metrics
from dips.telemetry import metrics
from dips.telemetry.metrics import Histogram
from dips.view import prometheus
from dips.view.page import document
from dips.view.page.memory import PageMemory
from tests.unit.view.views import make_cluster, make_run, make_slave

STATUS = {
    "view": make_run(
        {
            "fast": make_cluster("pushing", "pushes", inc=1, accepted=9),
            "late": make_cluster("idle", "stalled", trainer="dead", inc=3),
            "slow": replace(make_cluster("gone", "silent", inc=3), heartbeat=None),
        },
        {"s0": make_slave(bytes_in=100, transfers=(Transfer("fast", 1, 3, True, 40, 80),))},
        term=2,
        head="v12@r17",
        progress=ProgressView(500),
        uptime_s=3.5,
        rounds=RoundCounts(12, 1, 4),
        newest=NewestView(committed=993.0, clusters=1),
        lease=LeaseView("a", age_s=1.5),
    ),
    "meters": RoundMeters(),
    "wall": 1000.0,
}
ALL = (*prometheus.TABLES, *slave_metrics.TABLES, *agent_metrics.TABLES, *metrics.TABLES)


class Found(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self.collect = lambda: families  # type: ignore[method-assign]


def exposed(families: list[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Found(families))
    text = generate_latest(registry).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


def test_a_scrape_says_what_the_status_says() -> None:
    """Numbers come with their names and labels, states as labels; what nobody has reported is left out, not zero."""
    found = exposed(list(prometheus.collect(STATUS)))
    fast, slow = (("cluster", "fast"),), (("cluster", "slow"),)
    assert found["dips_head_version", ()] == 12
    assert found["dips_head_round", ()] == 17
    assert found["dips_rounds_skipped_total", ()] == 4
    assert found["dips_lease_timestamp_seconds", ()] == 998.5 and found["dips_standbys", ()] == 0
    assert found["dips_head_timestamp_seconds", ()] == 993 and ("dips_durable_timestamp_seconds", ()) not in found
    assert found["dips_cluster_accepted_total", fast] == 9
    assert ("dips_cluster_inner_steps", slow) not in found
    assert ("dips_cluster_staleness", fast) not in found
    assert found["dips_cluster_quarantined", fast] == 0
    for who, present in ((fast, "pushing"), (slow, "gone")):
        states = {dict(labels)["state"]: value for (name, labels), value in found.items()
                  if name == "dips_cluster_state" and who[0] in labels}  # fmt: skip
        assert states == {state.value: float(state.value == present) for state in ClusterState}
    assert found["dips_cluster_heard_timestamp_seconds", fast] == 1000.0 - STATUS["view"].clusters["fast"].heard_s
    moving = (("cluster", "fast"), ("direction", "push"), ("slave", "s0"))
    assert (found["dips_transfer_bytes", moving], found["dips_transfer_size_bytes", moving]) == (40, 80)
    standing = {labels[0][1]: value for (name, labels), value in found.items() if name == "dips_clusters"}
    assert standing == {"live": 2, "participating": 1, "contributing": 1}


def test_a_histogram_counts_up_to_each_bound() -> None:
    """A value on a bound counts there; the last bucket holds all."""
    histogram = Histogram((1.0, 3.0))
    for value in (0.5, 1.0, 2.0, 50.0):
        histogram.observe_value(value)
    assert histogram.list_buckets() == [("1.0", 2), ("3.0", 3), ("+Inf", 4)]
    assert histogram.total == 53.5
    found = exposed(list(slave_metrics.collect({"orders": {"fold": histogram}})))
    fold = (("order", "fold"),)
    assert found["dips_shard_order_seconds_count", fold] == 4
    assert found["dips_shard_order_seconds_bucket", (("le", "3.0"), *fold)] == 3


def test_names_are_said_once() -> None:
    """Two rows of one name would be one metric with two meanings."""
    rows = [row for table, _ in ALL for row in table]
    names = [row.series for row in rows]
    assert len(names) == len(set(names))
    assert all(row.help.endswith(".") and row.name.startswith(("dips_", "process_")) for row in rows)


def test_disks_are_looked_at_beside_a_scrape() -> None:
    """What hangs is not waited for longer than LOOK_S; what cannot be looked at is left out."""
    looks = metrics.DiskLooks(lambda: {"disks": 1})
    assert looks.read_newest() == {"disks": 1}
    looks.close()


def test_disks_are_measured_when_somebody_asks_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading is one look at the disks, and ends with it: the thread does not go on looking by itself."""
    monkeypatch.setattr(metrics, "LOOK_S", 1000.0)
    looks = list[int]()

    def look() -> dict[str, int]:
        looks.append(len(looks))
        return {"look": len(looks)}

    disks = metrics.DiskLooks(look)
    assert [disks.read_newest(), disks.read_newest()] == [{"look": 1}, {"look": 2}]
    (thread,) = (t for t in threading.enumerate() if t.name == "disk looks")
    disks.close()
    thread.join(10.0)
    assert not thread.is_alive() and len(looks) == 2


def test_runs_are_told_apart() -> None:
    """Each sample has the run, parts of histograms too: two runs meet in one Prometheus."""
    histogram = Histogram((1.0,))
    histogram.observe_value(0.5)
    families = metrics.add_run(slave_metrics.collect({"orders": {"fold": histogram}, "version": 3}), "my-run")
    found = exposed(list(families))
    assert found["dips_shard_version", (("run", "my-run"),)] == 3
    assert found["dips_shard_order_seconds_bucket", (("le", "1.0"), ("order", "fold"), ("run", "my-run"))] == 1
    assert all(("run", "my-run") in labels for _, labels in found)


def test_a_process_counts_its_files() -> None:
    """What a flood takes first: open file descriptors, read anew at each scrape."""
    before = metrics.read_process()
    with open(__file__) as _:
        assert metrics.read_process()["process_open_fds"] == before["process_open_fds"] + 1
    assert before["process_max_fds"] >= before["process_open_fds"]
    assert 0 < before["process_start_time_seconds"] < time.time()


def test_nothing_moves_at_a_lost_slave() -> None:
    """Its last heartbeat is kept, with the push that it was receiving."""
    lost = make_slave("lost", "silent", transfers=(Transfer("fast", 1, 3, True, 40, 80),))
    found = exposed(list(prometheus.collect(STATUS | {"view": replace(STATUS["view"], slaves={"s0": lost})})))
    assert found["dips_slave_state", (("slave", "s0"), ("state", "lost"))] == 1
    assert not [name for name, _ in found if name.startswith("dips_transfer")]
    shown = document.make_state(make_run({"fast": make_cluster()}, {"s0": lost}), PageMemory(), wall=0.0)
    assert shown["clusters"]["rows"][0]["ends"] == []
