"""The metrics of every daemon: its memory, disks, loop, certificate, and refusals."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from dips.telemetry.metrics import MetricRow, Status, Table, make_families

PROCESS = (
    MetricRow("dips_ready", "ready", "1 while /readyz says so."),
    MetricRow("dips_resident_bytes", "resident", "Physical memory of the process."),
    MetricRow("dips_loop_lag_seconds", "lag", "How late its event loop wakes, four times a second.", histogram=True),
    MetricRow("dips_certificate_expiry_seconds", "expiry_s", "Until its certificate expires; below 0: it has."),
    MetricRow("dips_http_connections", "connections", "Open at its HTTP port."),
)
INFO = (MetricRow("dips_info", "one", "Always 1; says which release this is, and as what it runs."),)
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


def resident_bytes() -> int:
    """Return the physical memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
