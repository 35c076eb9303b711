"""Classification of SQLite's exceptions about a ledger's file: its bytes are damaged, or the disk or the process fails.

An operator who reads "damaged" moves a file away, so it must not be said of a full disk, or of missing file
descriptors.
"""

from __future__ import annotations

import os
import sqlite3

from dips.errors import CorruptLedger, FailedDisk

ADVICE = (
    "this ledger is damaged. Move it away, with its -wal and -shm, and start dips-master, which restores it from "
    "master.mirror; without a mirror put a backup in its place and run `dips-master recover`, without a backup run "
    "`dips recover` (docs/guides/operations.md#restore)"
)
# SQLite's primary result codes that do not concern a file's bytes.
FAILING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}
PRIMARY = 0xFF  # mask for extended codes: SQLITE_IOERR_FSYNC is an SQLITE_IOERR


def is_failing(error: Exception) -> bool:
    """Whether an exception of the sqlite3 module means that the disk or this process fails."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # exceptions of the module's Python part have none
    return code & PRIMARY in FAILING and code != sqlite3.SQLITE_IOERR_SHORT_READ  # a file that ends in a page


def refuse_failing(error: Exception, path: str) -> None:
    """Raise FailedDisk if the exception means that the disk or this process fails; else return.

    Raise CorruptLedger for a read-only error on a writable file: SQLite does not write a file whose header requires a
    later version of SQLite.
    """
    if not is_failing(error):
        return
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_READONLY" and os.access(path, os.W_OK):
        raise CorruptLedger(f"{path}: its head says that SQLite may not write it; {ADVICE}") from error
    raise FailedDisk(f"{path}: SQLite cannot use this ledger: {error} ({name})") from error
