"""Prometheus metrics, read from a daemon's state at each scrape, histograms, and the metrics of every daemon."""

from __future__ import annotations

import shutil
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

# ---- histogram ------------------------------------------------------------------------------------------------------
# Histograms for Prometheus: the distribution of waits and durations, not only the last value.
#
# One thread observes values; any thread may read, and may miss one that is being added.


# Seconds, by factors of about three: from a small model on one machine to an outer step of hours.
PHASE_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
LAG_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of an event loop


class Histogram:
    """Counts of values up to each of some bounds."""

    def __init__(self, bounds: Sequence[float] = PHASE_S) -> None:
        self._bounds, self._counts, self._sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe_value(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self._sum

    def list_buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) for Prometheus; the last bound is infinite."""
        return list(zip((*map(str, self._bounds), "+Inf"), map(float, accumulate(self._counts)), strict=True))


# ---- metrics --------------------------------------------------------------------------------------------------------
# Prometheus metrics, read from a daemon's state at each scrape, so that no number is kept twice.
#
# Tables map numbers to metrics: those of the master, the slave and the agent are beside these, those of every daemon
# below. docs/guides/metrics.md lists all metrics. Labels are names of clusters and slaves, whose number is bounded
# by the run, and constants of the code; versions and texts are never labels. Units are bytes and seconds, as the names'
# endings say.


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


def add_run(families: Iterable[Metric], run: str) -> Iterator[Metric]:
    """Add the label `run` to each sample, so that one Prometheus tells the runs apart that it scrapes."""
    for family in families:
        family.samples = [sample._replace(labels={"run": run, **sample.labels}) for sample in family.samples]
        yield family


# ---- process --------------------------------------------------------------------------------------------------------
# The metrics of every daemon: its memory, disks, loop, certificate, and refusals.


PROCESS = (
    MetricRow("process_cpu_seconds", "process_cpu_seconds_total", "Processor time, user and system.", counter=True),
    MetricRow("process_start_time_seconds", "process_start_time_seconds", "Unix time at which the process began."),
    MetricRow("process_resident_memory_bytes", "process_resident_memory_bytes", "Physical memory of the process."),
    MetricRow("process_virtual_memory_bytes", "process_virtual_memory_bytes", "Address space of the process."),
    MetricRow("process_open_fds", "process_open_fds", "File descriptors that are open: files and connections."),
    MetricRow("process_max_fds", "process_max_fds", "Most file descriptors that may be open."),
    MetricRow("dips_ready", "ready", "1 while /readyz says so."),
    MetricRow("dips_loop_lag_seconds", "lag", "How late its event loop wakes, four times a second.", histogram=True),
    MetricRow(
        "dips_certificate_expiry_timestamp_seconds", "expires", "Unix time at which its certificate expires, or did."
    ),
    MetricRow("dips_certificate_issued_timestamp_seconds", "issued", "Unix time at which its certificate was signed."),
    MetricRow("dips_http_connections", "connections", "Open at its HTTP port."),
)
INFO = (MetricRow("dips_build_info", "one", "Always 1; says which release this is, and as what it runs."),)
DISK = (
    MetricRow("dips_disk_free_bytes", "free", "Left to this user on the disk of a directory."),
    MetricRow("dips_disk_size_bytes", "size", "Size of that disk."),
)
REFUSED = (MetricRow("dips_refusals", "count", "What came from outside and was refused, by reason.", counter=True),)

TABLES: tuple[Table, ...] = ((PROCESS, ()), (INFO, ("role", "version")), (DISK, ("directory",)), (REFUSED, ("reason",)))
LOOK_S = 2.0  # longest wait of a scrape for the disks; then it shows their last values


def collect(status: Status) -> Iterator[Metric]:
    """Convert the values that dips/http/daemon.py reads into metric families."""
    yield from make_families(PROCESS, [((), status)], ())
    yield from make_families(INFO, [((status["role"], status["version"]), {"one": 1})], ("role", "version"))
    disks = [((key,), numbers) for key, numbers in status.get("disks", {}).items()]
    yield from make_families(DISK, disks, ("directory",))
    refused = [((reason,), {"count": count}) for reason, count in status.get("refusals", {}).items()]
    yield from make_families(REFUSED, refused, ("reason",))


def read_process() -> dict[str, float]:
    """Return what prometheus_client reads of this process from /proc, by the names of the series."""
    families = ProcessCollector(registry=None).collect()
    return {sample.name: sample.value for family in families for sample in family.samples}


def measure_disks(directories: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    """Return free bytes and size by the directory's key in the configuration; unreadable ones are left out."""
    found = {}
    for key, path in directories.items():
        try:
            usage = shutil.disk_usage(path)
        except OSError:
            continue
        found[key] = {"free": usage.free, "size": usage.total}
    return found


class DiskLooks:
    """Measures disks on its own thread: a mount that hangs blocks neither a scrape nor the daemon's end."""

    def __init__(self, look: Callable[[], dict[str, Any]]) -> None:
        self._look, self._wanted, self._done = look, threading.Event(), threading.Event()
        self._found: dict[str, Any] = {}
        self._closed = False
        threading.Thread(target=self._serve_looks, name="disk looks", daemon=True).start()

    def read_newest(self) -> dict[str, Any]:
        """Return the disks' present values; the last known ones if measuring takes longer than LOOK_S."""
        self._done.clear()
        self._wanted.set()
        self._done.wait(LOOK_S)
        return self._found

    def close(self) -> None:
        self._closed = True
        self._wanted.set()

    def _serve_looks(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closed:
                return
            self._found = self._look()
            self._done.set()
