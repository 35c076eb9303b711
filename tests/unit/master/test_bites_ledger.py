"""What the ledger promises: a row is on the disk when `write_records` returns, and SQLite is configured so."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dips.config import load_run
from dips.errors import FailedDisk, StaleTerm
from dips.master import ledger as ledger_module
from dips.master import restore, waiting
from dips.master.ledger import Ledger
from dips.master.restore import MirroredLedger, MirroredTransaction
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import Manifest
from dips.protocol.records import ProtocolRaised, RoundReserved, RunRow
from dips.protocol.releases import OLDEST_PROTOCOL
from dips.store.mirror import MirrorStore
from tests.disk_calls import DiskCalls
from tests.run_files import write_run_file

MANIFEST = Manifest.from_shapes([("a.w", (4,))])
ROW = RunRow("r", "c", MANIFEST.to_json(), (("s", (0,)),), ("0" * 32,), (1.0,))
FULL = 2  # of PRAGMA synchronous
MEMORY_STORE = 2  # of PRAGMA temp_store


def pragma(db: sqlite3.Connection, name: str) -> object:
    return db.execute(f"PRAGMA {name}").fetchone()[0]


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Every connection that the ledger opens: what was set on it is known to nobody else."""
    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def recorded(*args: object, **kwargs: object) -> sqlite3.Connection:
        made.append(connect(*args, **kwargs))  # type: ignore[arg-type]
        made[-1].execute("PRAGMA synchronous = OFF")  # some builds of SQLite begin so
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


def test_views_of_an_older_ledger_are_in_memory(connections: list[sqlite3.Connection]) -> None:
    """No file beside those that are synced."""
    made = Ledger.create(":memory:", replace(ROW, protocol=OLDEST_PROTOCOL))
    assert pragma(connections[0], "temp_store") == MEMORY_STORE
    made.close()


def test_a_disk_that_is_not_there_is_not_a_damaged_ledger(tmp_path: Path) -> None:
    """The ledger's name leads to a volume that nobody has mounted."""
    (tmp_path / "ledger.sqlite").symlink_to(tmp_path / "volume" / "ledger.sqlite")
    with pytest.raises(FailedDisk, match=r"SQLite cannot use this ledger.*SQLITE_CANTOPEN"):
        Ledger.create(tmp_path / "ledger.sqlite", ROW)


def test_a_ledger_that_somebody_else_reads_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a backup, without a WAL, that a backup program holds: it cannot be written to in that moment."""
    monkeypatch.setattr(ledger_module, "BUSY_S", 0.0)
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, ROW).close()
    with closing(sqlite3.connect(path)) as reader:
        reader.execute("PRAGMA journal_mode = DELETE")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM run").fetchone()
        with pytest.raises(FailedDisk, match=r"SQLite cannot use this ledger.*SQLITE_BUSY"):
            Ledger.open(path)


def test_a_new_ledger_s_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file exists only when its directory says so."""
    disk = DiskCalls(tmp_path, monkeypatch)
    Ledger.create(tmp_path / "ledger.sqlite", ROW).close()
    assert disk.calls == ["fsync ."]


def test_the_file_of_the_former_format_is_whole_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who must go back to the release before has nothing else."""
    with closing(Ledger.create(tmp_path / "ledger.sqlite", replace(ROW, protocol=OLDEST_PROTOCOL))) as ledger:
        disk, kept = DiskCalls(tmp_path, monkeypatch), f"ledger.format{OLDEST_PROTOCOL}"
        ledger.write_records([ProtocolRaised(OLDEST_PROTOCOL + 1, 0.0)])
    assert disk.calls == [f"fsync {kept}.tmp", f"rename {kept}.tmp {kept}.sqlite", "fsync ."]


def test_a_ledger_that_begins_with_dips_seed_is_whole_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no WAL lies beside it that SQLite would play into it."""
    config = load_run(write_run_file(tmp_path, ["s"]))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "ledger.sqlite-wal").write_bytes(b"of a ledger that somebody removed")
    proposed = waiting.propose_run({"a.w": np.ones(4, np.float32)}, Grouping())
    disk = DiskCalls(tmp_path / "m", monkeypatch)
    waiting.begin_run(config, proposed, lambda: 0.0)
    assert disk.calls[disk.calls.index("fsync .beginning") :] == [
        "fsync .beginning",
        "fsync .beginning/ledger.sqlite",
        "remove ledger.sqlite-wal",
        "fsync .",
        "rename .beginning/ledger.sqlite ledger.sqlite",
        "fsync .",
        "remove .beginning",
    ]


def test_a_restored_ledger_is_whole_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut leaves no ledger or all of it, and beside it no WAL of the one before."""
    Ledger.create(tmp_path / "base.sqlite", ROW).close()
    path = tmp_path / "m" / "ledger.sqlite"
    path.parent.mkdir()
    path.with_name("ledger.sqlite-wal").write_bytes(b"of a master that crashed")
    disk = DiskCalls(path.parent, monkeypatch)
    with restore.make_aside(path) as fetched:
        fetched.write_bytes((tmp_path / "base.sqlite").read_bytes())
        restore.build_file(MirroredLedger(3, fetched, (MirroredTransaction((RoundReserved(1, 0.0),), 0.0),)), path)
    assert disk.calls == [
        "fsync .restoring/ledger.sqlite",
        "remove ledger.sqlite-wal",
        "fsync .",
        "rename .restoring/ledger.sqlite ledger.sqlite",
        "fsync .",
        "remove .restoring",
    ]


@pytest.mark.parametrize("kind", ["base", "log"])
def test_what_is_mirrored_is_on_the_mirror_s_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """File, name, and the names of the folders that are new; what a base replaces goes when it is durable."""
    (tmp_path / "mirror").mkdir()
    store = MirrorStore(str(tmp_path / "mirror"), "r", "master")
    written = MirroredTransaction((RoundReserved(1, 0.0),), 0.0)
    disk = DiskCalls(tmp_path / "mirror", monkeypatch)
    restore.write_transaction(store, "r", 3, 1, written)
    folder, name = "r/master/ledger", "0000000003-0000000001.log"
    whole = [f"fsync {folder}/.unfinished-NAME", f"rename {folder}/.unfinished-NAME {folder}/NAME", f"fsync {folder}"]
    if kind == "log":
        made = ["fsync .", "fsync r", "fsync r/master"]
        assert disk.calls == [*made, *(call.replace("NAME", name) for call in whole)]
        return
    del disk.calls[:]
    (tmp_path / "base").write_bytes(b"content")
    restore.write_base(store, "r", 3, 2, tmp_path / "base")
    assert disk.calls[:3] == [call.replace("NAME", "0000000003-0000000002.base") for call in whole]
    assert store.list_names("ledger") == ["0000000003-0000000002.base"]


def test_a_file_that_is_mirrored_piece_by_piece_has_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The initial model: nothing is written behind it."""
    (tmp_path / "mirror").mkdir()
    store = MirrorStore(str(tmp_path / "mirror"), "r", "master")
    disk = DiskCalls(tmp_path / "mirror", monkeypatch)
    with store.create_file("initial/v0@r0/00000.safetensors", len(b"content")) as file:
        file.write(b"content")
    folder = "r/master/initial/v0@r0"
    aside, name = f"{folder}/.unfinished-00000.safetensors", f"{folder}/00000.safetensors"
    assert disk.calls[-3:] == [f"fsync {aside}", f"rename {aside} {name}", f"fsync {folder}"]


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
