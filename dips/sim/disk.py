"""The simulated disks: of the ledger (below), and of one slave. The latter is full or slow at times; a snapshot being
written may be torn, written ones may rot, and an old copy of the directory may be restored. Otherwise they survive.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from errno import EMFILE
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from dips.errors import ConfigError, CorruptSnapshot, Stale
from dips.ids import GENESIS, VersionId
from dips.master.ledger import MEMORY, Ledger
from dips.master.restore import MirroredLedger, MirroredTransaction, build_file, make_aside, rebuild
from dips.protocol.records import Record, RunRow
from dips.slave.ports import F32, READ_AT_START, Arrays


@dataclass
class Snapshot:
    """One snapshot: its content, and whether its manifest was written. `rotten`: a bit has flipped."""

    theta: dict[int, F32]
    momentum: dict[int, F32]
    whole: bool = True
    rotten: bool = False

    @property
    def good(self) -> bool:
        """Whether a reader that compares every digest accepts the snapshot."""
        return self.whole and not self.rotten

    @property
    def digest(self) -> str:
        crc = 0
        for arrays in (self.theta, self.momentum):
            for layer in sorted(arrays):
                crc = zlib.crc32(arrays[layer].tobytes(), crc)
        return f"{crc:08x}"


class SimDisk:
    """Implements `dips.slave.ports.Disk`; belongs to the machine, not to the process.

    Rot affects the stored bytes: the process that wrote a snapshot, or has verified it, keeps reading the page cache,
    as on Linux; its successor finds the digest wrong and skips the snapshot. Like snapshots.py, a process reads the
    newest few when it registers, and others when they are wanted.
    """

    def __init__(
        self, genesis: Arrays, rng: Random, passed_over: Callable[[], None] = lambda: None, shared: bool = True
    ) -> None:
        self._genesis = genesis
        self._rng = rng
        self._passed_over = passed_over
        self.files: dict[VersionId, Snapshot] = {}
        self.shared = shared  # v0@r0 is where initial_model points, independent of this disk
        self.seeded = shared  # v0@r0 is available: shared, or seeded to this disk
        self.nonce = ""  # nonce of the last process here that registered
        self.full = False
        self.slowness = 1.0
        self.fsync_s = 0.0  # duration of an fsync, which reports no progress
        self.no_files = False  # its process has no descriptors left: no further file can be opened
        self.swapped_with: SimDisk | None = None  # the disk with which it was exchanged; None: it is in its place
        self._replaced: dict[VersionId, Snapshot] = {}  # snapshots replaced by an old copy
        self.harmed: set[VersionId] = set()  # snapshots that rotted, or were lost with the directory
        self._read: set[VersionId] = set()  # snapshots that the present process wrote, or has read

    def begin_process(self) -> None:
        """Note that another process uses the disk, which has read nothing yet."""
        self._read.clear()

    def repair_disk(self) -> None:
        """Remove all faults but rot: the disk has room, is fast and is in its place."""
        self.full, self.slowness, self.fsync_s, self.no_files = False, 1.0, 0.0, False
        self.swap_back()

    def swap_with(self, other: SimDisk) -> None:
        """Attach two disks to each other's machines, so that each slave finds the other's directory."""
        self.swapped_with, other.swapped_with = other, self

    def swap_back(self) -> None:
        """Attach both disks where they belong, as an operator would after reading the refusal."""
        if (other := self.swapped_with) is not None:
            self.swapped_with = other.swapped_with = None

    def require_owner(self) -> None:
        """Raise ConfigError if this directory is another slave's, as snapshots.py does when a daemon opens it."""
        if self.swapped_with is not None and self.swapped_with.files:
            raise ConfigError("directory: it holds snapshots of another slave: were two disks swapped?")

    def flip_bit(self) -> None:
        """Flip a bit of one snapshot, mostly of the newest."""
        whole = [version for version, snapshot in self.files.items() if snapshot.good]
        if whole:
            version = max(whole) if self._rng.random() < 0.7 else self._rng.choice(whole)
            self.files[version].rotten = True
            self.harmed.add(version)

    def copy_directory(self) -> dict[VersionId, Snapshot]:
        """Return a copy of the directory; snapshots never change, so their references suffice."""
        return dict(self.files)

    def put_back(self, copy: dict[VersionId, Snapshot]) -> None:
        """Replace the directory by an old copy."""
        lost = {v: s for v, s in self.files.items() if v not in copy or not copy[v].good}
        self.harmed.update(lost)
        self._replaced.update(lost)
        self.files, self.nonce = dict(copy), ""

    def lose_disk(self) -> None:
        """Replace the disk by an empty one, for good."""
        self.harmed.update(self.files)
        self.files, self.nonce = {}, ""
        self.seeded = self.shared

    def bring_back(self, version: VersionId, snapshot: Snapshot) -> None:
        """Restore a copy from a mirror, so that its loss no longer counts."""
        self.files[version] = Snapshot(snapshot.theta, snapshot.momentum)
        self.harmed.discard(version)
        self._replaced.pop(version, None)

    def restore_copy(self) -> bool:
        """Restore rotten and replaced snapshots, as an operator would; return whether there were any."""
        changed = bool(self._replaced) or any(snapshot.rotten for snapshot in self.files.values())
        self.files.update(self._replaced)
        self._replaced.clear()
        for snapshot in self.files.values():  # replaced snapshots may have rotted before
            snapshot.rotten = False
        self.harmed.difference_update(self.files)  # snapshots of a lost disk are restored by the slave's mirror
        return changed

    @property
    def good_versions(self) -> list[VersionId]:
        """The versions whose snapshots can be read."""
        return [v for v, s in self.files.items() if s.good]

    @property
    def takes_files(self) -> bool:
        """Whether a file can be written."""
        return not (self.full or self.no_files)

    def _require_descriptor(self) -> None:
        if self.no_files:
            raise OSError(EMFILE, "too many open files")

    def complete_versions(self, look_for: Collection[VersionId] = ()) -> tuple[VersionId, ...]:
        self._require_descriptor()
        left = READ_AT_START
        for version, snapshot in sorted(self.files.items(), key=lambda item: item[0].round, reverse=True):
            if left > 0 or version in look_for:
                self._read.add(version)
                left -= snapshot.good
        if any(not self.files[v].good for v in self._read & self.files.keys()):
            self._passed_over()
        return tuple(sorted(v for v in self._read & self.files.keys() if self.files[v].good))

    def unread_versions(self) -> tuple[VersionId, ...]:
        return tuple(sorted(self.files.keys() - self._read))

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        self._require_descriptor()
        if self.full:
            raise OSError(28, "no space left on the simulated disk")

    def release_room(self, version: VersionId) -> None:
        """Do nothing, since room is not counted here."""

    def write_snapshot(
        self, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool] = lambda: True
    ) -> str:
        if not is_wanted():
            raise Stale(f"the snapshot of {version} is wanted no more")
        self._require_descriptor()
        if self.full:
            raise OSError(28, "no space left on the simulated disk")
        snapshot = Snapshot(_copy_arrays(theta), _copy_arrays(momentum))
        self.files[version] = snapshot
        self._read.add(version)
        self.harmed.discard(version)
        return snapshot.digest

    def tear_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        """Leave half of the bytes and no manifest, as if the machine had stopped during the write."""
        if version in self.files or not self.takes_files:
            return
        half = {
            layer: np.concatenate([a[: a.size // 2], np.zeros(a.size - a.size // 2, np.float32)])
            for layer, a in theta.items()
        }
        self.files[version] = Snapshot(half, _copy_arrays(momentum), whole=False)

    def read_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        self._require_descriptor()
        snapshot = self.files.get(version)
        if snapshot is None and version == GENESIS and self.seeded:
            snapshot = Snapshot(dict(self._genesis), {layer: np.zeros_like(a) for layer, a in self._genesis.items()})
        self._read.add(version)
        if snapshot is None or not snapshot.good:
            self._passed_over()
            present = ", ".join(map(str, self.complete_versions())) or "none"
            raise CorruptSnapshot(f"expected a whole snapshot of {version}, this disk has {present}")
        for layer, array in theta.items():
            array[:] = snapshot.theta[layer]
        for layer, array in momentum.items():
            array[:] = snapshot.momentum[layer]

    def holds_initial(self) -> bool:
        return self.seeded

    def keep_initial(self, theta: Arrays) -> None:
        self._require_descriptor()
        if self.full:
            raise OSError(28, "no space left on the simulated disk")
        if any(not np.array_equal(theta[layer], held) for layer, held in self._genesis.items()):
            raise CorruptSnapshot("what was brought is not this run's first model")
        self.seeded = True

    def keep_model(self, version: VersionId, theta: Arrays, digests: tuple[str, ...]) -> tuple[str, VersionId | None]:
        newest = max((v for v in self.files if self.files[v].good), key=lambda v: v.round, default=None)
        zeros = {layer: np.zeros_like(a) for layer, a in theta.items()}
        return self.write_snapshot(version, theta, self.files[newest].momentum if newest else zeros), newest

    def map_theta(self, version: VersionId) -> Arrays | None:
        """Return the θ of a snapshot, which a reader keeps when the file is deleted; None if there is none. v0@r0 has
        no file.
        """
        snapshot = self.files.get(version)
        known = snapshot is not None and snapshot.whole and version in self._read
        return snapshot.theta if snapshot is not None and known and not self.no_files else None

    def map_momentum(self, version: VersionId) -> tuple[Arrays, tuple[str, ...]] | None:
        return None  # the simulated runs are not rebalanced

    def delete_snapshots(self, versions: tuple[VersionId, ...]) -> None:
        for version in versions:
            self.files.pop(version, None)
            self._read.discard(version)


def _copy_arrays(arrays: Arrays) -> dict[int, F32]:
    return {layer: np.array(a, copy=True) for layer, a in arrays.items()}


# ---- ledger disk -----------------------------------------------------------------------------------------------------
# The Ledger on it is the real one. A write may end between two of its statements; a backup may replace the newest file,
# which is still kept.


FILE = "ledger.sqlite"


class Torn(Exception):
    """The machine stopped between two statements of a transaction."""


class TearingConnection:
    """The ledger's SQLite connection, which stops for good before its n-th writing statement."""

    def __init__(self, db: sqlite3.Connection, statements: int) -> None:
        self._db = db
        self._left = statements

    def execute(self, sql: str, *parameters: Any) -> Any:
        self._left -= not sql.startswith("SELECT")  # reading statements do not count
        if self._left < 0:
            raise Torn
        return self._db.execute(sql, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


class SimLedger(Ledger):
    """The ledger as one process writes it: `on_written` gets the records of each transaction, once they are durable."""

    def __init__(self, db: sqlite3.Connection, disk: LedgerDisk) -> None:
        super().__init__(db, ExitStack(), lambda: 0.0)
        self._disk = disk
        self.on_written: Callable[[Sequence[Record]], None] = lambda records: None

    def write_records(self, records: Sequence[Record], wall: float | None = None) -> None:
        """Write a transaction. Raises OSError if the disk is full, StaleTerm if there is a later term."""
        if self._disk.full:
            raise OSError("database or disk is full")
        super().write_records(records, wall)
        self.on_written(records)


class LedgerDisk:
    """The ledger's file: every process opens it anew and finds the durable state."""

    def __init__(self, row: RunRow) -> None:
        self._db = Ledger.create(":memory:", row)._db
        self._newest: sqlite3.Connection | None = None  # the newest file while an old copy replaces it; None: in place
        self._copies: list[sqlite3.Connection] = []
        self._mirrored_base = self._db.serialize()
        self._mirrored_since: list[MirroredTransaction] = []
        self._mirrored_term = 0
        self.slowness = 1.0
        self.full = False

    def repair_disk(self) -> None:
        self.slowness, self.full = 1.0, False

    @property
    def is_old_copy(self) -> bool:
        """Whether an old copy is in place: decisions of its master are not the run's."""
        return self._newest is not None

    def copy_file(self) -> sqlite3.Connection:
        """Return a backup of the present file."""
        copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.backup(copy)
        self._copies.append(copy)
        return copy

    def put_back(self, copy: sqlite3.Connection) -> None:
        """Restore a backup, although the newest file still exists."""
        self._newest, self._db = self._db, copy

    def put_newest_back(self) -> None:
        """Restore the newest file, as the master's refusal asks for."""
        if self._newest is not None:
            self._db, self._newest = self._newest, None

    def begin_mirror(self, term: int) -> None:
        """Begin a term: the mirror gets a base, unless this is an old copy."""
        if not self.is_old_copy:
            self._mirrored_base, self._mirrored_since, self._mirrored_term = self._db.serialize(), [], term

    def mirror_records(self, records: Sequence[Record]) -> None:
        """Add a durable transaction to the mirror, before its effects are announced."""
        self._mirrored_since.append(MirroredTransaction(tuple(records), 0.0))

    def lose_disk(self) -> list[Record]:
        """Lose the disk; the next master starts from the mirror on another one, which has room. Return the records that
        the rebuild raised.
        """
        self.repair_disk()
        self._copies.append(self._db)
        self._db = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
        self._db.deserialize(self._mirrored_base)
        _, raised = rebuild(self.open_ledger(), self._mirrored_term, self._mirrored_since)
        return raised

    def restore_beside_wal(self, directory: Path) -> list[Record]:
        """Restore from the mirror after a killed master's file was moved away but not its WAL; return the raised
        records.

        Uses the daemon's restore on real files in `directory`.
        """
        base, since, term = self._mirrored_base, tuple(self._mirrored_since), self._mirrored_term
        raised, path = self.lose_disk(), directory / FILE
        leave_wal(path, base, since)
        with make_aside(path) as fetched:
            fetched.write_bytes(base)
            build_file(MirroredLedger(term, fetched, since), path)
        self._copies.append(self._db)
        self._db = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
        restored = Ledger.open(path)
        try:
            restored._db.execute("PRAGMA journal_mode = DELETE")  # a copy in memory cannot have a WAL
            restored._db.backup(self._db)
        finally:
            restored.close()
        return raised

    def restore_lagging(self, copy: sqlite3.Connection, times: int) -> None:
        """Restore the file `times` times from a mirror that lagged and held `copy`; the newest file still exists.

        Somebody has made room for it. Raises DipsError, with the first restore in place, if a second one is refused.
        """
        self.repair_disk()
        self.put_back(copy)
        for _ in range(times):
            rebuild(self.open_ledger(), 0, ())

    def open_ledger(self) -> SimLedger:
        return SimLedger(self._db, self)

    def tear_write(self, records: Sequence[Record], statements: int) -> bool:
        """Stop before the n-th statement of a write, which SQLite then rolls back; return True if the write was
        complete.
        """
        torn = TearingConnection(self._db, statements)
        try:
            Ledger(torn, None, lambda: 0.0).write_records(records)  # type: ignore[arg-type]
        except Torn:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return False
        return True

    def close(self) -> None:
        self.put_newest_back()
        for db in (self._db, *self._copies):
            db.close()


def leave_wal(path: Path, base: bytes, since: Sequence[MirroredTransaction]) -> None:
    """Leave the WAL of a killed ledger beside `path`, with the transactions since its base."""
    path.write_bytes(base)
    killed = Ledger.open(path)
    try:
        killed._db.execute("PRAGMA wal_autocheckpoint = 0")
        for transaction in since:
            killed.write_records(transaction.records, transaction.wall)
        wal = path.with_name(f"{path.name}-wal")
        left = wal.read_bytes() if wal.exists() else b""
    finally:
        killed.close()  # moves the WAL into the file
    path.unlink()
    wal.write_bytes(left)
