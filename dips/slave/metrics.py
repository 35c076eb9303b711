"""The metrics that a slave exports about itself, dips_shard_…; the master exports dips_slave_… from all heartbeats."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import Metric

from dips.store.version import version_of
from dips.telemetry.metrics import MetricRow, Status, Table, make_families

# ---- disk room ------------------------------------------------------------------------------------------------------
# Free disk space where the snapshots are, for people; asked on a thread of its own, since a disk may hang.


ASKED_EVERY_S = 10.0


class FreeDisk(NamedTuple):
    """Bytes; both 0 while unknown."""

    free: int = 0
    total: int = 0


class DiskRoom:
    """Free disk space for heartbeats, returned at once as last measured."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._room, self._due, self._asking = FreeDisk(), 0.0, False

    def read_room(self) -> FreeDisk:
        """Return the last measurement; if it is old, start a thread to measure anew, unless one is still running."""
        if not self._asking and time.monotonic() >= self._due:
            self._asking = True
            threading.Thread(target=self._ask_disk, name="disk-room", daemon=True).start()
        return self._room

    def _ask_disk(self) -> None:
        try:
            found = shutil.disk_usage(self._directory)
            self._room = FreeDisk(found.free, found.total)
        except OSError:
            self._room = FreeDisk()  # its snapshots will report the reason
        finally:
            self._due, self._asking = time.monotonic() + ASKED_EVERY_S, False


# ---- metrics --------------------------------------------------------------------------------------------------------
# Labels are names of clusters whose push or pull the master opened here, kinds of orders and reasons of refusals, all
# bounded by the run or by a table.


SELF = (
    MetricRow("dips_shard_incarnation", "sinc", "Incarnations of this slave so far, as its master counts."),
    MetricRow("dips_shard_version", "version", "Outer steps of the version in memory."),
    MetricRow("dips_shard_version_round", "round", "The round that made the version in memory."),
    MetricRow("dips_shard_pool_bytes", "pool_used", "Memory pool in use."),
    MetricRow("dips_shard_pool_limit_bytes", "pool_limit", "The pool's written sum."),
    MetricRow("dips_shard_transit_bytes", "transit_used", "Asked for and not yet in place."),
    MetricRow("dips_shard_transit_limit_bytes", "transit_limit", "Most that may be asked for and not yet in place."),
    MetricRow("dips_shard_staged", "staged", "Pushes that lie whole here and wait for the master."),
    MetricRow("dips_shard_persist_seconds", "persist_s", "Its last snapshot took."),
    MetricRow("dips_shard_apply_seconds", "apply_s", "Its last outer step took."),
    MetricRow("dips_shard_restored_bytes", "work.nbytes", "Of the snapshot that it reads or restores, done."),
    MetricRow("dips_shard_restored_size_bytes", "work.total", "Of the snapshot that it reads or restores, in all."),
    MetricRow("dips_shard_snapshots", "snapshots", "Versions in its directory."),
    MetricRow("dips_shard_snapshot_bytes", "snapshot_bytes", "Size of all of them."),
)
LINK = (MetricRow("dips_shard_link_bytes", "nbytes", "Moved from (in) or to (out) a cluster.", counter=True),)
ORDER = (MetricRow("dips_shard_order_seconds", "took", "An order took, by its kind.", histogram=True),)
REFUSED = (MetricRow("dips_shard_frames_refused", "count", "Frames that were refused, by reason.", counter=True),)

TABLES: tuple[Table, ...] = (
    (SELF, ()), (LINK, ("cluster", "direction")), (ORDER, ("order",)), (REFUSED, ("reason",))
)  # fmt: skip


def collect(status: Status) -> Iterator[Metric]:
    """Convert the values that app.py reads (see the keys below) into metric families."""
    yield from make_families(SELF, [((), status)], ())
    links = [
        ((name, direction), {"nbytes": nbytes})
        for direction in ("in", "out")
        for name, nbytes in status.get(direction, {}).items()
    ]
    yield from make_families(LINK, links, ("cluster", "direction"))
    orders = [((kind,), {"took": histogram}) for kind, histogram in status.get("orders", {}).items()]
    yield from make_families(ORDER, orders, ("order",))
    refused = [((reason,), {"count": count}) for reason, count in status.get("refused", {}).items()]
    yield from make_families(REFUSED, refused, ("reason",))


def count_snapshots(directory: Path) -> dict[str, int]:
    """Count the snapshots in a slave's directory and their bytes; of those that are removed meanwhile, or cannot be
    read, no bytes are counted. Without the directory nothing is.
    """
    try:
        versions = [path for path in directory.iterdir() if version_of(path) is not None]
    except OSError:
        return {}
    return {"snapshots": len(versions), "snapshot_bytes": sum(size for path in versions for size in _file_sizes(path))}


def _file_sizes(version: Path) -> Iterator[int]:
    with suppress(OSError):
        for file in version.iterdir():
            yield file.stat().st_size
