"""The ledger's file in a simulated world: a database in memory that survives every process and may be torn or outdated.

The Ledger on it is the real one. A write may end between two of its statements; a backup may replace the newest file,
which is still kept.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dips.master.ledger import MEMORY, Ledger
from dips.master.restore import MirroredLedger, MirroredTransaction, build_file, rebuild
from dips.protocol.records import Record, RunRow

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
        """Lose the disk; the next master starts from the mirror. Return the records that the rebuild raised."""
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
        build_file(MirroredLedger(term, base, since), path)
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

        Raises DipsError, with the first restore in place, if a second one is refused.
        """
        self.put_back(copy)
        for _ in range(times):
            rebuild(self.open_ledger(), 0, ())

    def open_ledger(self) -> Ledger:
        return Ledger(self._db, None, lambda: 0.0)

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
