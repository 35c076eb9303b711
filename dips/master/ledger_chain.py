"""The ledger's hash chain: each transaction is hashed over its rows and the hash before it, and what SQLite says of
damaged files.
"""

from __future__ import annotations

import os
import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from operator import ge
from typing import Any

import msgspec
import xxhash

from dips.errors import CorruptLedger, FailedDisk

# ---- ledger errors --------------------------------------------------------------------------------------------------
# Classification of SQLite's exceptions about a ledger's file: its bytes are damaged, or the disk or the process fails.
#
# An operator who reads "damaged" moves a file away, so it must not be said of a full disk, or of missing file
# descriptors.


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


# ---- ledger chain ---------------------------------------------------------------------------------------------------
# The ledger's hash chain: each transaction is hashed over its rows and the hash before it, so that every changed bit is
# found.
#
# `chain` has a row for each transaction: its number, the rows that it wrote (by table: keys, and a digest of each row;
# 0 for a deleted one), and the hash of the former link's hash, its number and these. A row is hashed as SQLite returns
# it, its rowid and all columns in msgpack. Rows that are rewritten (`score_history`) are compared with their newest
# digest. The tables' definitions are hashed by the first link, and by each that changes them.
#
# What must stay true: every row of the ledger is written through ChainedRows, into tables, hence `main.`: an older
# ledger is read through views of the same names. A ledger is verified whenever it is opened: first SQLite's own
# integrity_check of pages and indexes, which checks no values; then every row against the chain, in one pass. A flipped
# bit may still cut the end of a WAL that a crash left, which gives an older ledger; a mirror that has more, or a slave
# that has seen more, reveals that (docs/rationale.md#2).


CHAIN, SCHEMA = "chain", "sqlite_schema"
DELETED = 0  # in place of a digest, which is never 0
FIRST = bytes(16)  # the hash before the first link
MOST_LINES = 3  # of integrity_check's output
ROWS_READ = 1_000  # at a time

Row = tuple[Any, ...]


class ChainedRows:
    """Writes the rows of one transaction and remembers their keys; `write_link` must come last."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self._keys: defaultdict[str, dict[int, None]] = defaultdict(dict)  # by table, in the order of writing

    @property
    def form(self) -> int:
        """The format of the ledger's tables."""
        (form,) = self.db.execute("PRAGMA user_version").fetchone()
        return int(form)

    def insert_row(self, table: str, values: Sequence[Any]) -> int:
        """Insert a row; return its rowid."""
        return self._write_row("INSERT", table, values)

    def replace_row(self, table: str, values: Sequence[Any]) -> int:
        """Insert a row or replace the one with its key; return its rowid."""
        return self._write_row("INSERT OR REPLACE", table, values)

    def delete_rows(self, table: str) -> None:
        """Delete all rows of a table."""
        self._note_rows(table)
        self.db.execute(f"DELETE FROM main.{table}")

    def chain_all(self) -> None:
        """Add the tables' definitions and every existing row, for a ledger that has no chain yet."""
        self.chain_tables(_list_tables(self.db))

    def chain_tables(self, changed: Iterable[str]) -> None:
        """Add the tables' definitions, and the rows of tables whose columns have changed."""
        self._keys[SCHEMA][0] = None
        for table in changed:
            self._note_rows(table)

    def write_link(self) -> None:
        """Append a link with the digests of all rows written, as they are in the tables now."""
        if not self._keys:
            return
        written = [
            [table, list(keys), [self._digest_row(table, key) for key in keys]] for table, keys in self._keys.items()
        ]
        newest = self.db.execute(f"SELECT number, hash FROM {CHAIN} ORDER BY number DESC LIMIT 1").fetchone()
        number, before = newest or (0, FIRST)
        content = msgspec.msgpack.encode(written)
        self.db.execute(
            f"INSERT INTO {CHAIN} VALUES (?, ?, ?)", (number + 1, content, _hash_link(number + 1, before, content))
        )

    def _write_row(self, verb: str, table: str, values: Sequence[Any]) -> int:
        key = self.db.execute(_spell_insert(verb, table, len(values)), values).lastrowid
        assert key is not None
        self._keys[table][key] = None
        return key

    def _note_rows(self, table: str) -> None:
        for (key,) in self.db.execute(f"SELECT rowid FROM main.{table}"):
            self._keys[table][key] = None

    def _digest_row(self, table: str, key: int) -> int:
        if table == SCHEMA:
            return _digest_schema(self.db)
        row = self.db.execute(f"SELECT rowid, * FROM main.{table} WHERE rowid = ?", (key,)).fetchone()
        return DELETED if row is None else _digest(row)


@cache
def _spell_insert(verb: str, table: str, columns: int) -> str:
    return f"{verb} INTO main.{table} VALUES ({','.join('?' * columns)})"


def _digest(row: Row) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(row)) or 1


def _hash_link(number: int, before: bytes, content: bytes) -> bytes:
    return xxhash.xxh3_128_digest(before + number.to_bytes(8, "little") + content)


def _list_tables(db: sqlite3.Connection) -> list[str]:
    """Return the names of all tables but the chain, sorted."""
    query = f"SELECT name FROM {SCHEMA} WHERE type = 'table' AND name NOT IN (?, 'sqlite_sequence') ORDER BY name"
    return [name for (name,) in db.execute(query, (CHAIN,))]


def _digest_schema(db: sqlite3.Connection) -> int:
    """Return a digest of the definitions of tables and indexes, which excludes SQLite's page numbers."""
    return _digest(tuple(db.execute(f"SELECT type, name, tbl_name, sql FROM {SCHEMA} ORDER BY name")))


# ---- verifying ------------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """A description of the damage, without the file's path."""


class _Claims:
    """The chain's keys and digests of one table, in the order of writing; the newest of a key counts."""

    def __init__(self) -> None:
        self.keys, self.digests = array("q"), array("Q")

    def settle(self) -> None:
        """Reduce to one digest for each row that should exist, sorted by key."""
        keys, digests = self.keys, self.digests
        if any(map(ge, keys, islice(keys, 1, None))) or not all(digests):
            newest = sorted(pair for pair in dict(zip(keys, digests, strict=True)).items() if pair[1] != DELETED)
            self.keys, self.digests = array("q", (k for k, _ in newest)), array("Q", (d for _, d in newest))


def verify_pages(db: sqlite3.Connection, where: str) -> None:
    """Raise CorruptLedger unless SQLite finds the file's pages and indexes sound."""
    _verify(_check_pages, db, where)


def verify_chain(db: sqlite3.Connection, where: str) -> None:
    """Raise CorruptLedger unless every row is as its last transaction wrote it, and none is missing."""
    _verify(_check_chain, db, where)


@contextmanager
def refuse_damage(where: str) -> Iterator[None]:
    """Raise CorruptLedger for what the body finds unreadable in a ledger, FailedDisk if the disk fails."""
    try:
        yield
    except _Damaged as damage:
        problem = str(damage)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        refuse_failing(error, where)
        problem = f"SQLite cannot read all of it: {error}"
    else:
        return
    raise CorruptLedger(f"{where}: {problem}; {ADVICE}")


def _verify(check: Callable[[sqlite3.Connection], None], db: sqlite3.Connection, where: str) -> None:
    with refuse_damage(where):
        db.execute("BEGIN")
        try:
            check(db)
        finally:
            _end_reading(db)


def _end_reading(db: sqlite3.Connection) -> None:
    if db.in_transaction:
        db.execute("ROLLBACK")  # nothing was written


def _check_pages(db: sqlite3.Connection) -> None:
    lines = [str(line) for (line,) in db.execute(f"PRAGMA integrity_check({MOST_LINES})")]
    if lines != ["ok"]:
        raise _Damaged(f"pages or indexes are unsound: {'; '.join(lines)}")


def _check_chain(db: sqlite3.Connection) -> None:
    claims = _read_claims(db)
    schema = claims.pop(SCHEMA, _Claims())
    if list(schema.digests)[-1:] != [_digest_schema(db)]:
        raise _Damaged("its tables are not those that its transactions made")
    for table in _list_tables(db):
        _check_table(db, table, claims.pop(table, _Claims()))
    if claims:
        raise _Damaged(f"table {min(claims)} is gone")


def _read_claims(db: sqlite3.Connection) -> dict[str, _Claims]:
    """Walk the chain from its first link; return keys and digests by table."""
    claims: defaultdict[str, _Claims] = defaultdict(_Claims)
    before = FIRST
    links = db.execute(f"SELECT number, rows, hash FROM {CHAIN} ORDER BY number")
    for expected, (number, content, told) in enumerate(links, 1):
        if number != expected:
            raise _Damaged(f"transaction {expected} is gone from the chain")
        if not isinstance(content, bytes) or _hash_link(number, before, content) != told:
            raise _Damaged(f"row {number} of table {CHAIN}, of transaction {number}, is not what was written")
        for table, keys, digests in msgspec.msgpack.decode(content):
            claims[table].keys.extend(keys)
            claims[table].digests.extend(digests)
        before = told
    return claims


def _check_table(db: sqlite3.Connection, table: str, claims: _Claims) -> None:
    found = _Claims()
    try:
        for keys, digests in _read_rows(db, table):
            found.keys.extend(keys)
            found.digests.extend(digests)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if is_failing(error):
            raise
        raise _Damaged(_describe_unreadable(db, table)) from None
    claims.settle()
    if (found.keys, found.digests) != (claims.keys, claims.digests):
        raise _Damaged(_describe_difference(db, table, claims, found))


def _read_rows(db: sqlite3.Connection, table: str) -> Iterator[tuple[list[int], list[int]]]:
    """Iterate over keys and digests of a table's rows, in batches, by key."""
    rows = db.execute(f"SELECT rowid, * FROM main.{table} ORDER BY rowid")
    pack, digest = msgspec.msgpack.Encoder().encode, xxhash.xxh3_64_intdigest
    while some := rows.fetchmany(ROWS_READ):
        yield [row[0] for row in some], [digest(pack(row)) or 1 for row in some]


def _describe_difference(db: sqlite3.Connection, table: str, claims: _Claims, found: _Claims) -> str:
    """Describe the first row that differs, and the transaction that wrote it."""
    meant, there = (dict(zip(c.keys, c.digests, strict=True)) for c in (claims, found))
    key = min(k for k in meant.keys() | there.keys() if meant.get(k) != there.get(k))
    if key not in meant:
        return f"row {key} of table {table} was written by no transaction"
    what = "is not what was written" if key in there else "is gone"
    return f"row {key} of table {table}, of transaction {_find_writer(db, table, key)}, {what}"


def _describe_unreadable(db: sqlite3.Connection, table: str) -> str:
    """Describe the row whose text is no longer valid UTF-8."""
    db.text_factory = bytes
    try:
        for row in db.execute(f"SELECT rowid, * FROM main.{table} ORDER BY rowid"):
            for value in row:
                try:
                    value.decode() if isinstance(value, bytes) else None
                except UnicodeDecodeError as error:
                    writer = _find_writer(db, table, row[0])
                    return f"row {row[0]} of table {table}, of transaction {writer}, is not what was written: {error}"
    finally:
        db.text_factory = str
    return f"table {table} cannot be read"


def count_transactions_after(db: sqlite3.Connection, table: str, key: int) -> int:
    """Return how many transactions came after the last one that wrote this row."""
    (newest,) = db.execute(f"SELECT coalesce(max(number), 0) FROM {CHAIN}").fetchone()
    try:
        return int(newest) - _find_writer(db, table, key)
    except (msgspec.DecodeError, TypeError, ValueError) as error:  # the chain was not verified
        raise _Damaged(f"table {CHAIN} cannot be read: {error}") from error


def _find_writer(db: sqlite3.Connection, table: str, key: int) -> int:
    """Return the last transaction that wrote this row, 0 if none did."""
    query = f"SELECT number, rows FROM {CHAIN} ORDER BY number DESC"
    return next(
        (
            number
            for number, content in db.execute(query)
            if any(name == table and key in keys for name, keys, _ in msgspec.msgpack.decode(content))
        ),
        0,
    )
