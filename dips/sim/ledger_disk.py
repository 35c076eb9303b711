"""The ledger's file in a simulated world: a database in memory that survives every process and may be torn or be old.

The Ledger on it is the real one. A write may end between two of its statements; a backup may be put in the place of
the newest file, which somebody still has.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dips.master.ledger import MEMORY, Ledger
from dips.master.ledger_rebuild import MirroredLedger, MirroredTransaction, rebuild
from dips.master.restore import build_file
from dips.protocol.records import Record, RunRow

FILE = "ledger.sqlite"


class Torn(Exception):
    """The machine stopped between two statements of a transaction."""


class TearingConnection:
    """The ledger's SQLite connection, which stops for good before its n-th statement that writes."""

    def __init__(self, db: sqlite3.Connection, statements: int) -> None:
        self._db = db
        self._left = statements

    def execute(self, sql: str, *parameters: Any) -> Any:
        self._left -= not sql.startswith("SELECT")  # what reads changes nothing
        if self._left < 0:
            raise Torn
        return self._db.execute(sql, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


class LedgerDisk:
    """The ledger's file: every process opens it anew and finds what was durable."""

    def __init__(self, row: RunRow) -> None:
        self._db = Ledger.create(":memory:", row)._db
        self._newest: sqlite3.Connection | None = None  # while an old copy lies in its place
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
        """An old copy lies there: what its master decides is not the run's truth."""
        return self._newest is not None

    def copy_file(self) -> sqlite3.Connection:
        """A backup of the file as it is now."""
        copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.backup(copy)
        self._copies.append(copy)
        return copy

    def put_back(self, copy: sqlite3.Connection) -> None:
        """Somebody restores a backup, not knowing that the newest file is still to be had."""
        self._newest, self._db = self._db, copy

    def put_newest_back(self) -> None:
        """The act that the master's refusal asks for."""
        if self._newest is not None:
            self._db, self._newest = self._newest, None

    def begin_mirror(self, term: int) -> None:
        """A term has begun: the mirror gets a base, unless this is an old copy."""
        if not self.is_old_copy:
            self._mirrored_base, self._mirrored_since, self._mirrored_term = self._db.serialize(), [], term

    def mirror_records(self, records: Sequence[Record]) -> None:
        """A transaction is durable, and in the mirror before anybody is told."""
        self._mirrored_since.append(MirroredTransaction(tuple(records), 0.0))

    def lose_disk(self) -> list[Record]:
        """The disk is gone for good; the next master starts with what its mirror holds. Return what was raised."""
        self._copies.append(self._db)
        self._db = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
        self._db.deserialize(self._mirrored_base)
        _, raised = rebuild(self.open_ledger(), self._mirrored_term, self._mirrored_since)
        return raised

    def restore_beside_wal(self, directory: Path) -> list[Record]:
        """A killed master's file was moved away and its WAL was not; the next master restores it from the mirror.

        By what the daemon restores with, on real files in `directory`. Return what was raised.
        """
        base, since, term = self._mirrored_base, tuple(self._mirrored_since), self._mirrored_term
        raised, path = self.lose_disk(), directory / FILE
        leave_wal(path, base, since)
        build_file(MirroredLedger(term, base, since), path)
        self._copies.append(self._db)
        self._db = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
        restored = Ledger.open(path)
        try:
            restored._db.execute("PRAGMA journal_mode = DELETE")  # memory has no WAL: a copy could not be opened
            restored._db.backup(self._db)
        finally:
            restored.close()
        return raised

    def restore_lagging(self, copy: sqlite3.Connection, times: int) -> None:
        """The file is restored, so many times, from a mirror that lagged: `copy` is what it held.

        Somebody still has the newest file. Raise DipsError, with the first restore in place, if a second is refused.
        """
        self.put_back(copy)
        for _ in range(times):
            rebuild(self.open_ledger(), 0, ())

    def open_ledger(self) -> Ledger:
        return Ledger(self._db, None, lambda: 0.0)

    def tear_write(self, records: Sequence[Record], statements: int) -> bool:
        """Stop before the n-th statement of a write; what SQLite then finds is rolled back. True if it was through."""
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
    """Leave beside `path` the WAL of a ledger that was killed: of the transactions since its base."""
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
