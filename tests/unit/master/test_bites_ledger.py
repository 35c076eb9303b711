"""What the ledger promises: a row is on the disk when `write_records` returns, and SQLite is configured so."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from dips.errors import StaleTerm
from dips.master import ledger as ledger_module
from dips.master.ledger import Ledger
from dips.protocol.manifest import Manifest
from dips.protocol.records import RoundReserved, RunRow

MANIFEST = Manifest.from_shapes([("a.w", (4,))])
ROW = RunRow("r", "c", MANIFEST.to_json(), (("s", (0,)),), ("0" * 32,), (1.0,))
FULL = 2  # of PRAGMA synchronous


def pragma(db: sqlite3.Connection, name: str) -> object:
    return db.execute(f"PRAGMA {name}").fetchone()[0]


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Every connection that the ledger opens: what was set on it is known to nobody else."""
    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def recorded(*args: object, **kwargs: object) -> sqlite3.Connection:
        made.append(connect(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(ledger_module.sqlite3, "connect", recorded)
    return made


def test_every_writer_is_durable_and_checks_what_rows_refer_to(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    """The maker of a ledger and whoever opens it to write: WAL, synchronous=FULL, foreign keys."""
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, ROW).close()
    opened = Ledger.open(path)
    (db,) = connections[1:]
    assert [pragma(db, name) for name in ("journal_mode", "synchronous", "foreign_keys")] == ["wal", FULL, 1]
    opened.close()


def test_the_maker_writes_durably(connections: list[sqlite3.Connection]) -> None:
    made = Ledger.create(":memory:", ROW)
    assert pragma(connections[0], "synchronous") == FULL and pragma(connections[0], "foreign_keys") == 1
    made.close()


def test_a_new_ledger_s_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file exists only when its directory says so."""
    synced: list[str] = []
    fsync = os.fsync

    def recorded(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    Ledger.create(tmp_path / "ledger.sqlite", ROW).close()
    assert synced == [str(tmp_path)]


def test_a_master_does_not_write_over_its_successor(tmp_path: Path) -> None:
    """A later term began in the same file, on a file system without locks: nothing more is written by this one."""
    path = tmp_path / "ledger.sqlite"
    first = Ledger.create(path, ROW)
    term = first.start_term()
    successor = sqlite3.connect(path)
    successor.execute("INSERT INTO terms VALUES (?, 0.0)", (term + 1,))
    successor.commit()
    successor.close()
    with pytest.raises(StaleTerm):
        first.write_records([RoundReserved(1, 0.0)])
    assert first.read_state().next_round == 1
    first.close()
