"""Metrics say what the status says, in the words of Prometheus."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dips.errors import ConfigError
from dips.telemetry import metrics

STATUS = {
    "term": 2,
    "head": "v12@r17",
    "progress": {"tokens": 500, "tokens_target": 0},
    "uptime_s": 3.5,
    "rounds": {"applied": 12, "skipped": 4, "unchanged": 1},
    "clusters": {
        "fast": {"state": "pushing", "inc": 1, "accepted": 9, "staleness": None, "quarantined": False, "loss": 2.5},
        "slow": {"state": "gone", "inc": 3},
    },
    "slaves": {
        "s0": {
            "state": "ready",
            "bytes_in": 100,
            "transfers": [{"cluster": "fast", "push": True, "nbytes": 40, "total": 80}],
        }
    },
}


def scraped(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


def test_a_scrape_says_what_the_status_says() -> None:
    """Numbers come with their names and labels, states as labels; what nobody has reported is left out, not zero."""
    port, end = metrics.serve_metrics(("127.0.0.1", 0), lambda: STATUS)
    try:
        found = scraped(port)
    finally:
        end()
    fast, slow = (("cluster", "fast"),), (("cluster", "slow"),)
    assert found["dips_head_version", ()] == 12
    assert found["dips_head_round", ()] == 17
    assert found["dips_rounds_skipped_total", ()] == 4
    assert found["dips_cluster_accepted_total", fast] == 9
    assert ("dips_cluster_accepted_total", slow) not in found
    assert ("dips_cluster_staleness", fast) not in found
    assert found["dips_cluster_quarantined", fast] == 0
    assert found["dips_cluster_state", (*fast, ("state", "pushing"))] == 1
    assert found["dips_cluster_state", (*slow, ("state", "gone"))] == 1
    moving = (("cluster", "fast"), ("direction", "push"), ("slave", "s0"))
    assert (found["dips_transfer_bytes", moving], found["dips_transfer_size_bytes", moving]) == (40, 80)


def test_names_are_said_once() -> None:
    """Two rows of one name would be one metric with two meanings."""
    names = [row.name for rows in (metrics.RUN, metrics.CLUSTER, metrics.SLAVE, metrics.TRANSFER) for row in rows]
    assert len(names) == len(set(names))
    assert all(row.help.endswith(".") for row in metrics.RUN + metrics.CLUSTER + metrics.SLAVE + metrics.TRANSFER)


def test_a_port_in_use_is_named() -> None:
    """The second server on a port names the port."""
    port, end = metrics.serve_metrics(("127.0.0.1", 0), lambda: STATUS)
    try:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            metrics.serve_metrics(("127.0.0.1", port), lambda: STATUS)
    finally:
        end()
