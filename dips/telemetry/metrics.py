"""Prometheus metrics, read from a daemon's state at each scrape, so that no number is kept twice.

Tables map numbers to metrics: those of the master, the slave and the agent are beside these, those of every daemon in
process.py. docs/guides/metrics.md lists all metrics. Labels are names of clusters and slaves, whose number is bounded
by the run, and constants of the code; versions and texts are never labels. Units are bytes and seconds, as the names'
endings say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dips.telemetry.histogram import Histogram

Status = Any  # numbers by name: a mapping, or an object with attributes


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric: its name, the path of its number (keys or attributes joined by dots), and its help text."""

    name: str
    path: str
    help: str
    counter: bool = False
    histogram: bool = False  # the value at `path` is a Histogram

    @property
    def series(self) -> str:
        """Name of the metric's series in an expression; for a histogram without `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.counter else self.name

    @property
    def kind(self) -> str:
        return "histogram" if self.histogram else "counter" if self.counter else "gauge"


Samples = Sequence[tuple[tuple[str, ...], Status]]  # (values of the labels, numbers) of each peer
Table = tuple[tuple[MetricRow, ...], tuple[str, ...]]  # (rows, names of the labels that they share)


def make_families(rows: Iterable[MetricRow], peers: Samples, labels: tuple[str, ...]) -> Iterator[Metric]:
    """Yield a metric family for each row, with a sample for each peer that has reported its number."""
    for row in rows:
        if row.histogram:
            yield _make_histogram(row, peers, labels)
            continue
        kind = CounterMetricFamily if row.counter else GaugeMetricFamily
        family = kind(row.name, row.help, labels=labels)
        for values, numbers in peers:
            value = _look_up(numbers, row.path)
            if isinstance(value, int | float):
                family.add_metric(values, float(value))
        yield family


def _make_histogram(row: MetricRow, peers: Samples, labels: tuple[str, ...]) -> Metric:
    family = HistogramMetricFamily(row.name, row.help, labels=labels)
    for values, numbers in peers:
        value = _look_up(numbers, row.path)
        if isinstance(value, Histogram):
            family.add_metric(values, value.list_buckets(), value.total)
    return family


def _look_up(numbers: Status, path: str) -> Any:
    value: Any = numbers
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    return value
