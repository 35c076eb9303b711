"""What a shard has under way on the disk: room that is reserved for a snapshot, one being written, some being deleted.

What must stay true: room is taken before anything is computed, and given back when its version will not be written;
while a version is being written on another thread, nothing may take its θ and m away: those of a round that is aborted
meanwhile stay until the writer has noticed. Pure, but for the disk (`ports.Disk`) that it is given.
"""

from __future__ import annotations

from collections.abc import Callable

from dips.errors import BusyDisk, FailedDisk
from dips.ids import VersionId
from dips.protocol.events import Answer, Done, Persisted
from dips.slave.ports import Arrays, Disk

DiskWork = Callable[[], Answer]  # done on another thread


class ShardSnapshots:
    """One shard's snapshots under way; at most one has room reserved, at most one is being written beside orders."""

    def __init__(self, name: str, disk: Disk) -> None:
        self._name, self._disk = name, disk
        self._reserved: VersionId | None = None
        self.writing: VersionId | None = None  # on another thread
        self.deleting = False  # on another thread
        self._wanted = True  # what is being written

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        """Take room for `nbytes` of θ and m; raise FailedDisk if it is not there, BusyDisk if some is being made."""
        if self._reserved != version:
            self.release_room()
        try:
            self._disk.reserve_room(version, nbytes)
        except OSError as error:
            if self.deleting:
                raise BusyDisk(
                    f"the snapshot of {version} waits for the room of those that are being deleted"
                ) from error
            raise FailedDisk(f"{self._name} has no room for the snapshot of {version}: {error}") from error
        self._reserved = version

    def release_room(self, unless: VersionId | None = None) -> None:
        """Give back what was reserved, unless it is for a version that still waits for its snapshot."""
        if self._reserved is not None and self._reserved != unless:
            self._disk.release_room(self._reserved)
            self._reserved = None

    def begin_writing(self, version: VersionId, theta: Arrays, momentum: Arrays) -> DiskWork:
        """Return what writes a snapshot into the room that was reserved for it, and returns its digest.

        `writing` says that it is under way; whoever began it makes it None when it has ended.
        """
        self.require_idle(f"Persist of {version}")
        if self._reserved == version:
            self._reserved = None
        self.writing, self._wanted = version, True

        def write_reserved() -> Answer:
            try:
                return Persisted(version, self._disk.write_snapshot(version, theta, momentum, lambda: self._wanted))
            except OSError as error:
                raise FailedDisk(f"{self._name} cannot write the snapshot of {version}: {error}") from error

        return write_reserved

    def give_up(self, version: VersionId) -> None:
        """End the writer of a version that will not be; it notices soon."""
        if self.writing == version:
            self._wanted = False

    def begin_deleting(self, versions: tuple[VersionId, ...]) -> DiskWork:
        """Return what deletes snapshots; `deleting` says that it is under way."""
        self.deleting = True

        def delete() -> Answer:
            try:
                self._disk.delete_snapshots(versions)
            except OSError as error:
                raise FailedDisk(f"{self._name} cannot delete snapshots: {error}") from error
            return Done()

        return delete

    def begin_keeping(self, theta: Arrays) -> DiskWork:
        """Return what writes v0@r0 for good, if it is that."""

        def keep_initial() -> Answer:
            try:
                self._disk.keep_initial(theta)
            except OSError as error:
                raise FailedDisk(f"{self._name} cannot write the first model: {error}") from error
            return Done()

        return keep_initial

    def require_idle(self, what: str, unless: VersionId | None = None) -> None:
        """Raise BusyDisk while a snapshot is being written, unless it is of that version."""
        if self.writing is not None and self.writing != unless:
            raise BusyDisk(f"{what} waits: the snapshot of {self.writing} is being written")
