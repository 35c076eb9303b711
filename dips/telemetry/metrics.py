"""Prometheus metrics: what a daemon knows, read when it is scraped, so that nothing is counted twice or forgotten.

Tables say which number becomes which metric; they stand beside the master, the slave and the agent, and in process.py
those of every daemon. docs/guides/metrics.md lists them all. Labels are names of clusters and slaves, whose number is
bounded by the run, and words of the code; versions and texts are never labels. Bytes and seconds, as the names' endings
say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dips.telemetry.histogram import Histogram

Status = Any  # numbers by name: a mapping, or an object that has them as attributes


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric: its name, where its number stands (keys or attributes joined by dots), and what it means."""

    name: str
    path: str
    help: str
    counter: bool = False
    histogram: bool = False  # what stands at `path` is a Histogram

    @property
    def series(self) -> str:
        """What it is called in an expression, but for the parts of a histogram."""
        return f"{self.name}_total" if self.counter else self.name

    @property
    def kind(self) -> str:
        return "histogram" if self.histogram else "counter" if self.counter else "gauge"


Samples = Sequence[tuple[tuple[str, ...], Status]]  # values of the labels, and where the numbers stand
Table = tuple[tuple[MetricRow, ...], tuple[str, ...]]  # rows, and the labels that they share


def make_families(rows: Iterable[MetricRow], peers: Samples, labels: tuple[str, ...]) -> Iterator[Metric]:
    """A family for each row, with a sample for each peer that has told its number."""
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
