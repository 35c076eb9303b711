"""The outer step of one shard: the open round, from its first Measure to its Commit or Abort.

What must stay true: a version is served only after its Commit; an order that fails half-way poisons its round, and then
only Abort is legal. The first order of a later round proves that the former one ended without a row (its Abort was
lost): presumed abort. Synchronous; it does not know fences and repetitions (shard.py).

`ShardSnapshots` tracks the shard's disk work meanwhile. Disk space for a snapshot is reserved before anything is
computed, and released when its version will not be written. While a version is written on another thread, its θ and m
must stay: those of a round that is aborted meanwhile stay until the writer has noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

from dips.errors import Busy, BusyDisk, DipsError, FailedDisk, LocalProtocolError, Stale, StaleVersion
from dips.ids import GENESIS, VersionId
from dips.outer.versions import Versions
from dips.protocol.effects import Abort, Apply, Fold, Measure
from dips.protocol.events import Answer, Done, Folded, Measured, Persisted, Prepared
from dips.protocol.manifest import BYTES_PER_PARAMETER
from dips.slave.actions import DiskWork, Read
from dips.slave.open_transfers import OpenTransfers
from dips.slave.ports import Arrays, Disk, Flow


class ShardRound:
    """The open round of one shard, and its base and prepared versions."""

    def __init__(
        self,
        name: str,
        versions: Versions,
        disk: Disk,
        flow: Flow,
        transfers: OpenTransfers,
        snapshots: ShardSnapshots,
    ) -> None:
        self.versions = versions
        self.number: int | None = None  # None between rounds
        self.poison: str | None = None  # why only Abort of it is legal
        self._name, self._disk, self._flow = name, disk, flow
        self._transfers, self._snapshots = transfers, snapshots
        self._last = 0

    def measure(self, order: Measure) -> Answer:
        """Legal for a staged push when θ is at the order's version and nothing is prepared; begins the round."""
        self._enter_round(order.round)
        if self.versions.served_version != order.version:
            raise StaleVersion(f"expected to measure against {self.versions.served_version}, got {order.version}")
        known = self._transfers.staged_push(order.push)
        with self._poison_on_error(f"Measure of {order.push}"):
            found = self.versions.measure_push(order.push)
        known.measured = order.round
        return Measured(found.layer_sq, all(map(isfinite, found.layer_sq)), found.layer_dot, found.digest)

    def fold(self, order: Fold) -> Answer:
        """Legal once for a push measured in this round; frees its slot."""
        self._enter_round(order.round)
        known = self._transfers.staged_push(order.push)
        if known.measured != order.round:
            raise LocalProtocolError(f"push {order.push} was not measured in round {order.round}")
        with self._poison_on_error(f"Fold of {order.push}"):
            self._flow.drop_push(order.push)
            try:
                return Folded(self.versions.fold_push(order.push, order.weight, order.layer_weights))
            finally:
                self._transfers.forget_push(order.push)

    def apply(self, order: Apply) -> Answer:
        """Legal when something is folded; computes θ′, m′ beside θ, m. Busy while readers use the bank of θ′.

        Disk space for the snapshot is reserved first, so that a full disk is found while nothing is lost.
        """
        self._enter_round(order.round)
        memory = self.versions.served_version
        if memory is None or order.version != VersionId(memory.version + 1, order.round):
            raise LocalProtocolError(f"Apply of {order.version} in round {order.round} cannot follow {memory}")
        if not self.versions.folded:
            raise LocalProtocolError(f"Apply of {order.version}: no push is folded in round {order.round}")
        self._snapshots.require_idle(f"Apply of {order.version}")
        if order.reserve:
            self._snapshots.reserve_room(order.version, 2 * BYTES_PER_PARAMETER * self.versions.numel)  # θ and m
        self._transfers.move_old_readers()
        with self._poison_on_error(f"Apply of {order.version}"):
            made = self.versions.prepare_version(order.version, order.step)
        self._transfers.forget_measures()
        return Prepared(order.version, made.layer_sq, made.digest)

    def abort(self, order: Abort) -> None:
        """Legal for any round without a row; a round before the open one is already over."""
        memory = self.versions.served_version
        if memory is not None and memory != GENESIS and memory.round == order.round:
            raise LocalProtocolError(f"Abort of round {order.round}, which is committed as {memory}")
        if self.number is None or order.round >= self.number:
            self.end_round()
        self._last = max(self._last, order.round)

    def _enter_round(self, round_: int) -> None:
        """Enter `round_`; a later one than the open one presumes that one aborted, unless it is in doubt."""
        if self.versions.prepared is not None:
            raise LocalProtocolError(
                f"round {round_}: {self.versions.prepared} is prepared, neither committed nor aborted"
            )
        if round_ < self._last or (round_ == self._last and self.number is None):
            raise Stale(f"round {round_} is over; the last one at {self._name} was {self._last}")
        if round_ != self.number:
            self.end_round()
            self.number = self._last = round_
        if self.poison is not None:
            raise LocalProtocolError(f"round {round_}: {self.poison}; only Abort is legal")

    def end_round(self) -> None:
        """Forget the open round and its prepared version: presumed abort."""
        self._snapshots.release_room(unless=self.versions.served_version)
        if self.versions.prepared is not None:
            self._snapshots.give_up(self.versions.prepared)
        self.versions.abort_round(written=self._snapshots.writing)
        self._transfers.forget_measures()
        self.number = self.poison = None

    def flip_version(self, version: VersionId) -> None:
        """Serve the prepared version. Idempotent."""
        if self.versions.served_version == version:
            return
        if self.versions.prepared != version:
            raise StaleVersion(
                f"Commit of {version}: {self._name} serves {self.versions.served_version}, "
                f"prepared is {self.versions.prepared}"
            )
        self._snapshots.require_idle(f"Commit of {version}", unless=version)
        self.versions.flip_version(version)
        self.end_round()
        self._transfers.move_old_readers()  # now, so that the next Apply finds its bank free

    def begin_load(self, version: VersionId) -> Read:
        """Return the function that reads a version's snapshot, for any thread; drops every push and closes every pull.

        The former version is served until `end_load`; orders that need one version or the other are Busy meanwhile.
        """
        if self.versions.prepared is not None and self.versions.prepared == self._snapshots.writing:
            self.end_round()  # its writer may stop; the load is tried again
        self._snapshots.require_idle(f"Load of {version}")
        self.end_round()
        self._transfers.drop_all()
        self._transfers.move_old_readers()
        theta, momentum = self.versions.begin_load(version)
        return lambda: self._disk.read_snapshot(version, theta, momentum)

    @contextmanager
    def _poison_on_error(self, what: str) -> Iterator[None]:
        """Poison the round on an exception, which may have left work half done; Busy is raised before any work."""
        try:
            yield
        except Busy:
            raise
        except Exception as error:
            self.poison = f"{what} failed: {error!r}"
            if isinstance(error, DipsError):
                raise
            raise LocalProtocolError(f"{self._name}: {self.poison}") from error


class ShardSnapshots:
    """The disk work of one shard; at most one snapshot has space reserved, at most one is written beside orders."""

    def __init__(self, name: str, disk: Disk) -> None:
        self._name, self._disk = name, disk
        self._reserved: VersionId | None = None
        self.writing: VersionId | None = None  # on another thread
        self.deleting = False  # on another thread
        self._wanted = True  # whether the snapshot being written is still wanted

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        """Reserve disk space for `nbytes` of θ and m; raise FailedDisk if there is none, BusyDisk while some is being
        freed.
        """
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
        """Release reserved space, unless it is for a version that still waits for its snapshot."""
        if self._reserved is not None and self._reserved != unless:
            self._disk.release_room(self._reserved)
            self._reserved = None

    def require_idle(self, what: str, unless: VersionId | None = None) -> None:
        """Raise BusyDisk while a snapshot is being written, unless it is of the version `unless`."""
        if self.writing is not None and self.writing != unless:
            raise BusyDisk(f"{what} waits: the snapshot of {self.writing} is being written")

    def begin_writing(self, version: VersionId, theta: Arrays, momentum: Arrays) -> DiskWork:
        """Return the function that writes a snapshot into its reserved space and returns its digest.

        `writing` names the version meanwhile; the caller sets it to None at the end.
        """
        self.require_idle(f"Persist of {version}")
        if self._reserved == version:
            self._reserved = None
        self.writing, self._wanted = version, True

        def write_snapshot() -> Answer:
            return Persisted(version, self._disk.write_snapshot(version, theta, momentum, lambda: self._wanted))

        return self._work_on_disk(f"write the snapshot of {version}", write_snapshot)

    def give_up(self, version: VersionId) -> None:
        """Stop the writer of a version that will not exist; it notices soon."""
        if self.writing == version:
            self._wanted = False

    def begin_deleting(self, versions: tuple[VersionId, ...]) -> DiskWork:
        """Return the function that deletes snapshots; `deleting` is True meanwhile."""
        self.deleting = True
        return self._work_on_disk("delete snapshots", lambda: self._disk.delete_snapshots(versions))

    def begin_keeping(self, theta: Arrays) -> DiskWork:
        """Return the function that writes v0@r0 durably, if the digests agree."""
        return self._work_on_disk("write the first model", lambda: self._disk.keep_initial(theta))

    def _work_on_disk(self, what: str, work: Callable[[], Answer | None]) -> DiskWork:
        def run() -> Answer:
            try:
                return work() or Done()
            except OSError as error:
                raise FailedDisk(f"{self._name} cannot {what}: {error}") from error

        return run
