"""What a shard has on its way to the disk: the room that is reserved for a snapshot, and the one that is being written.

What must stay true: room is taken before anything is computed, and given back when its version will not be written;
while the version that is served is being written on another thread, nothing may take its θ and m away. Pure, but for
the disk (`ports.Disk`) that it is given.
"""

from __future__ import annotations

from collections.abc import Callable

from dips.errors import Busy, FailedDisk
from dips.ids import VersionId
from dips.slave.ports import Arrays, Disk


class ShardSnapshots:
    """One shard's snapshots under way; at most one has room reserved, at most one is being written beside orders."""

    def __init__(self, name: str, disk: Disk) -> None:
        self._name, self._disk = name, disk
        self._reserved: VersionId | None = None
        self.writing: VersionId | None = None  # on another thread

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        """Take room for `nbytes` of θ and m; raise FailedDisk if it is not there."""
        if self._reserved != version:
            self.release_room()
        try:
            self._disk.reserve_room(version, nbytes)
        except OSError as error:
            raise FailedDisk(f"{self._name} has no room for the snapshot of {version}: {error}") from error
        self._reserved = version

    def release_room(self, unless: VersionId | None = None) -> None:
        """Give back what was reserved, unless it is for a version that still waits for its snapshot."""
        if self._reserved is not None and self._reserved != unless:
            self._disk.release_room(self._reserved)
            self._reserved = None

    def make_writer(self, version: VersionId, theta: Arrays, momentum: Arrays) -> Callable[[], str]:
        """Return what writes a snapshot into the room that was reserved for it, and returns its digest."""
        if self._reserved == version:
            self._reserved = None

        def write_reserved() -> str:
            try:
                return self._disk.write_snapshot(version, theta, momentum)
            except OSError as error:
                raise FailedDisk(f"{self._name} cannot write the snapshot of {version}: {error}") from error

        return write_reserved

    def require_idle(self, what: str) -> None:
        """Raise Busy while a snapshot is being written."""
        if self.writing is not None:
            raise Busy(f"{what} waits: the snapshot of {self.writing} is being written")
