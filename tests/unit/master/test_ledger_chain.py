"""The ledger's chain: one flipped bit in a closed ledger is harmless or refused, and named by table and row."""

from __future__ import annotations

import re
import resource
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from dips.errors import Corrupt, CorruptLedger, DipsError, FailedDisk, treatment_of
from dips.ids import GENESIS, PushId, VersionId
from dips.master.ledger import Ledger, put_in_place
from dips.master.ledger_chain import _Claims, _verify
from dips.outer_step import nesterov_step
from dips.protocol.enums import OutcomeKind, Role, RoundResult
from dips.protocol.options import Targets
from dips.protocol.records import (
    FoldRow,
    IncarnationGiven,
    OutcomeRow,
    PenaltyRow,
    RoundEnded,
    RoundReserved,
    RunExtended,
    RunFinished,
    RunRow,
    ScoreHistory,
    VersionCommitted,
    VersionResult,
)

ROW = RunRow("r", "d1" * 16, "{}", (("s0", (0, 2)), ("s1", (1,))), ("aa", "bb", "cc"), (1.0, 2.5, 0.0))
VERSIONS = 12
FLIPS = 200


def committed(n: int) -> VersionCommitted:
    version, parent = VersionId(n, n), VersionId(n - 1, n - 1) if n > 1 else GENESIS
    pushes = [PushId(cluster, 1, n) for cluster in ("a", "b")]
    return VersionCommitted(
        version, parent, True,
        tuple(FoldRow(p, parent, 1000 + n, 64, 1.0, 1.25 + n / 50, 0.5, 2.5 - n / 50, (n,)) for p in pushes),
        tuple(OutcomeRow(p, OutcomeKind.ACCEPTED, "", 1000 + n, 64, 1.25, 0.5, (n,)) for p in pushes),
        nesterov_step(0.5, 0.7, 0.8), 3.0, False, (("s0", f"{n:032x}"), ("s1", f"{n + 7:032x}")),
        tuple(PenaltyRow(p.cluster, n, 1.5 + n / 100, 0.25, 1.25, 9, 0, False, n) for p in pushes),
        ScoreHistory((0.5,) * n, (3.0,) * n), 12.5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of a run that was closed, with rows that were rewritten and deleted."""
    path = tmp_path_factory.mktemp("closed") / "ledger.sqlite"
    with closing(Ledger.create(path, ROW)) as ledger:
        ledger.start_term()
        ledger.write_records([IncarnationGiven(Role.CLUSTER, name, 1, f"n-{name}") for name in ("a", "b")])
        for n in range(1, VERSIONS + 1):
            ledger.write_records([RoundReserved(n, float(n))])
            ledger.write_records([committed(n)])
        head = VersionId(VERSIONS, VERSIONS)
        ledger.write_records([RunFinished(head, "far enough", 1.0)])
        ledger.write_records([RunExtended(Targets(versions=99), head, 2.0)])
        for number in (0.25, 0.5):
            ledger.write_records([VersionResult(head, True, "", (("loss", number),), 1.0)])
    return path


@pytest.fixture
def path(closed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(closed, tmp_path / "ledger.sqlite"))


def read_all(path: Path, *, readonly: bool = True) -> str:
    with closing(Ledger.open(path, readonly=readonly)) as ledger:
        digests = sorted(ledger.read_digests().items())
        return repr((ledger.read_state(), ledger.read_history(1000), digests, ledger.read_tokens()))


def change(path: Path, statement: str) -> None:
    """What no Di-PS wrote; SQLite keeps its own books right, so that the chain alone can tell."""
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement)
        db.commit()


def refused(path: Path) -> str:
    with pytest.raises(CorruptLedger) as raised:
        read_all(path)
    return str(raised.value)


def test_no_flipped_bit_is_read_as_another_history(closed: Path, tmp_path: Path) -> None:
    """Of some hundred bits anywhere in the file each is refused by our own error, or changes nothing that is read."""
    good, size, rng = read_all(closed), closed.stat().st_size, Random(7)
    seen = Counter[str]()
    for _ in range(FLIPS):
        at, bit = rng.randrange(size), rng.randrange(8)
        copy = tmp_path / "copy.sqlite"
        copy.write_bytes(_flipped(closed.read_bytes(), at, bit))
        try:
            assert read_all(copy) == good, f"byte {at} bit {bit}: silently another history"
            seen["harmless"] += 1
        except DipsError as error:
            seen[type(error).__name__] += 1
    assert seen["harmless"] > FLIPS / 2 and seen["CorruptLedger"] >= FLIPS / 10, seen


def test_no_flipped_bit_meets_a_writer_with_another_error(closed: Path, tmp_path: Path) -> None:
    """Of the head, and of what the tables are called: a master begins a term as before, or is refused by our error."""
    content, rng = closed.read_bytes(), Random(7)
    names = [at for word in (b"CREATE TABLE", b"CREATE INDEX") for at in _find_all(content, word)]
    tops = [(rng.choice(names) + rng.randrange(20, 60), 7) for _ in range(60)]  # bit 7: no letter any more
    for at, bit in [*((at, bit) for at in range(16, 24) for bit in range(8)), *tops]:
        copy = tmp_path / "copy.sqlite"
        copy.write_bytes(_flipped(content, at, bit))
        try:
            with closing(Ledger.open(copy)) as ledger:
                assert ledger.start_term() == 2
        except Corrupt:
            for beside in tmp_path.glob("copy.sqlite-*"):
                beside.unlink()


def _flipped(content: bytes, at: int, bit: int) -> bytes:
    flipped = bytearray(content)
    flipped[at] ^= 1 << bit
    return bytes(flipped)


def _find_all(content: bytes, word: bytes) -> Iterator[int]:
    return (found.start() for found in re.finditer(word, content))


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process grows beyond a page."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_copy_for_which_there_is_no_room_leaves_none_of_it(path: Path) -> None:
    """For the mirror it lies on the ledger's own disk, which the next transaction needs."""
    with closing(Ledger.open(path)) as ledger:
        with no_room(), pytest.raises(FailedDisk, match="SQLite cannot use this ledger"):
            ledger.copy_to(path.with_name("copy"))
        assert not list(path.parent.glob("copy*"))


def test_a_ledger_whose_wal_found_no_room_is_not_put_in_place(path: Path, tmp_path: Path) -> None:
    """SQLite closes it without a word: what was restored last was lost, or all of it, and each start ended with 65."""
    ledger = Ledger.open(path)
    ledger.start_term()
    with no_room():
        ledger.close()
    with pytest.raises(FailedDisk, match="its WAL could not be moved into it"):
        put_in_place(path, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_a_disk_that_fails_is_not_a_damaged_ledger(path: Path) -> None:
    """Nobody is told to move it away: not who opens it, and not who writes."""
    with no_room(), pytest.raises(FailedDisk, match=f"{path}: SQLite cannot use this ledger"):
        Ledger.open(path)
    with closing(Ledger.open(path)) as ledger:
        for _ in range(8):  # as much as the page that the limit leaves to a file
            ledger.start_term()
        with no_room(), pytest.raises(FailedDisk, match=f"{path}: SQLite cannot use this ledger"):
            ledger.start_term()
        assert ledger.start_term() == 10


@pytest.mark.parametrize("readonly", [True, False])
def test_what_is_wrong_is_named_with_what_to_do(path: Path, readonly: bool) -> None:
    """Table, row, the transaction that wrote it; where another copy may be. Master and readers refuse alike."""
    change(path, "UPDATE versions SET scale = 3.7e-155 WHERE round = 5")
    with pytest.raises(
        CorruptLedger, match=r"row 5 of table versions, of transaction 13, is not what was written"
    ) as e:
        read_all(path, readonly=readonly)
    assert str(path) in str(e.value) and treatment_of(e.value).exit_code == 65
    for remedy in ("master.mirror", "dips-master recover", "dips recover"):
        assert remedy in str(e.value)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE score_history SET scores = '[]'", "row 1 of table score_history, of transaction 27, is not what"),
        ("UPDATE version_results SET ok = 0", "row 12 of table version_results, of transaction 31, is not what"),
        ("DELETE FROM digests WHERE round = 3 AND slave = 's1'", "row 6 of table digests, of transaction 9, is gone"),
        ("INSERT INTO terms VALUES (2, NULL)", "row 2 of table terms was written by no transaction"),
        ("INSERT INTO finished VALUES (1, 12, 12, 'x', 0, 0)", "row 1 of table finished was written by no transaction"),
        ("UPDATE folds SET cluster = x'ff' || cluster WHERE rowid IN (4, 7)", "row 4 of table folds"),
        ("UPDATE folds SET cluster = CAST(x'ff' AS TEXT) WHERE rowid = 4", "row 4 of table folds, of transaction 7"),
        ("UPDATE chain SET rows = x'90' WHERE number = 9", "row 9 of table chain, of transaction 9, is not what"),
        ("DELETE FROM chain WHERE number = 9", "transaction 9 is gone from the chain"),
        ("DELETE FROM chain WHERE number = 31", "row 12 of table version_results"),
        ("DROP TABLE retired", "its tables are not those"),
        ("CREATE TABLE more (a)", "its tables are not those"),
    ],
)
def test_whatever_is_changed_added_or_taken_away(path: Path, statement: str, words: str) -> None:
    """Rows that are rewritten or deleted in the life of a run, too, the chain itself, and the list of tables."""
    change(path, statement)
    assert words in refused(path)


@pytest.mark.parametrize(
    ("keys", "digests", "settled"),
    [
        ([1, 2, 1], [5, 6, 7], [(1, 7), (2, 6)]),  # written again later
        ([1, 2], [5, 0], [(1, 5)]),  # written and deleted by one transaction
        ([2, 1], [6, 5], [(1, 5), (2, 6)]),
        ([1, 2], [5, 6], [(1, 5), (2, 6)]),
    ],
)
def test_the_newest_claim_on_a_row_counts(keys: list[int], digests: list[int], settled: list[tuple[int, int]]) -> None:
    claims = _Claims()
    claims.keys.extend(keys)
    claims.digests.extend(digests)
    claims.settle()
    assert list(zip(claims.keys, claims.digests, strict=True)) == settled


def test_what_a_master_writes_meanwhile_is_no_damage(path: Path) -> None:
    """Chain and rows are those of one moment, whoever reads them."""

    def check(db: sqlite3.Connection) -> None:
        (before,) = db.execute("SELECT count(*) FROM terms").fetchone()
        with closing(Ledger.open(path)) as master:
            master.start_term()
        assert db.execute("SELECT count(*) FROM terms").fetchone() == (before,)

    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        _verify(check, db, "it")


def test_a_disk_that_fails_while_a_ledger_is_verified(path: Path) -> None:
    def check(db: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error

    with closing(sqlite3.connect(path, isolation_level=None)) as db, pytest.raises(FailedDisk):
        _verify(check, db, "it")


def test_pages_that_cannot_be_read_are_named(path: Path) -> None:
    """SQLite says which; indexes are looked at, too, since states are read by them."""
    with closing(sqlite3.connect(path)) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'outcomes_by_cluster'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    content = bytearray(path.read_bytes())
    at = content.index(b"a", (root - 1) * size + size // 2)
    content[at] = ord("c")
    path.write_bytes(content)
    assert "pages or indexes are unsound: row" in refused(path)
    content[(root - 1) * size] ^= 0xFF
    path.write_bytes(content)
    assert "pages or indexes are unsound" in refused(path) or "SQLite cannot read all of it" in refused(path)


def test_who_reads_a_name_only_need_not_verify(path: Path) -> None:
    """Completion of a shell, and the term that is held against the mirror's."""
    change(path, "UPDATE versions SET scale = 3.7e-155 WHERE round = 5")
    with closing(Ledger.open(path, readonly=True, verified=False)) as ledger:
        assert ledger.read_term() == 1


def test_a_copy_has_the_chain(path: Path, tmp_path: Path) -> None:
    """Of a backup as the guide takes it, and of what the mirror gets."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("VACUUM INTO ?", (str(tmp_path / "backup.sqlite"),))
    with closing(Ledger.open(path)) as ledger:
        ledger.copy_to(tmp_path / "base.sqlite")
    assert read_all(tmp_path / "backup.sqlite") == read_all(tmp_path / "base.sqlite") == read_all(path)


def test_a_transaction_that_is_torn_leaves_no_link(path: Path) -> None:
    """What was rolled back is in neither table nor chain."""
    with closing(Ledger.open(path)) as ledger:
        with pytest.raises(sqlite3.IntegrityError):
            ledger.write_records([RoundReserved(99, 0.0), RoundReserved(1, 0.0)])
        ledger.write_records([])
        ledger.write_records([RoundReserved(99, 0.0), RoundEnded(99, RoundResult.SKIPPED, "x", (), (), float("nan"))])
    read_all(path)


@pytest.mark.parametrize("harm", [lambda raw: raw[:8192], lambda raw: raw[:-4096], lambda raw: raw[:100]])
def test_a_ledger_that_was_cut_short(path: Path, harm: Callable[[bytes], bytes]) -> None:
    """A copy that was broken off."""
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(DipsError):
        read_all(path)
