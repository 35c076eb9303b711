"""The ledger: the durable state of a run in SQLite (WAL, synchronous=FULL). The row of a version makes it exist.

One `write_records` is one transaction: all of its records are durable when it returns, or none is. One master holds the
file, by a lock beside it; readers (`dips history`, plots) open it read-only at any time. The Coordinator decides the
meaning of a record and when it is written; this file does not know them.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path

from dips.errors import ConfigError, Corrupt, FailedDisk, StaleTerm
from dips.files import PidLock, make_directory, sync_path
from dips.ids import VersionId
from dips.master import ledger_history
from dips.master.ledger_chain import (
    ChainedRows,
    count_transactions_after,
    refuse_failing,
    verify_chain,
    verify_pages,
)
from dips.master.ledger_history import (
    find_unprocessed,
    read_history,
    read_newest,
    read_results_after,
    read_rounds_after,
)
from dips.master.ledger_rows import run_statements, write_record, write_run
from dips.master.ledger_state import read_run, read_state, read_totals
from dips.master.schema import APPLICATION_ID, CHAIN, FORMATS, lacking_in, tables_of
from dips.protocol.records import LedgerState, OperatorActed, ProtocolRaised, Record, RunRow
from dips.view.points import RoundHistory

MEMORY = ":memory:"
FORMER = ".format{}.sqlite"  # end of the name of the file as it was before its format was raised from this one
SPARE_BYTES = 16 << 20  # left free behind such a copy, for the rounds that follow
BUSY_S = 10.0  # longest wait of SQLite for a reader's lock before a write fails

Wall = Callable[[], float]


def _no_clock() -> float:
    return 0.0


class Ledger:
    """One open ledger. Not safe from several threads at once; it may be created in one and used in another."""

    def __init__(self, db: sqlite3.Connection, held: ExitStack, wall: Wall) -> None:
        """`held` closes the connection, and then the lock."""
        self._db, self._held, self._wall = db, held, wall
        self._term = 0  # ours; 0 before start_term, which disables the check for a later term

    @classmethod
    def create(cls, path: Path | str, row: RunRow, wall: Wall = _no_clock) -> Ledger:
        """Create the ledger of a new run, in the format of its protocol; raise ConfigError if the file exists. `wall`
        returns Unix seconds, for people.
        """
        if Path(path).exists():
            raise ConfigError(f"{path}: a ledger is here already; a run is initialised once")
        with ExitStack() as held:
            held.enter_context(hold_ledger(path))
            db = held.enter_context(_connect_file(path, "rwc"))  # beside a new file SQLite removes a leftover WAL
            _write_durably(db)
            with _in_transaction(db) as rows:
                run_statements(db, f"{tables_of(row.protocol)};\n{CHAIN}")
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {row.protocol}")
                rows.chain_all()
                write_run(rows, row, wall)
            _view_as_newest(db)
            if str(path) != MEMORY:
                sync_path(Path(path).parent)
            return cls(db, held.pop_all(), wall)

    @classmethod
    def open(cls, path: Path | str, wall: Wall = _no_clock, *, readonly: bool = False, verified: bool = True) -> Ledger:
        """Open a run's ledger, and lock it against a second master unless `readonly`.

        Raise ConfigError if there is none, it is in use, or its format is not known; Corrupt if it is another file,
        CorruptLedger if a row is not as it was written; FailedDisk if it cannot be read. Without `verified` the rows
        are not checked, for readers of a name or a number that nothing depends on.
        """
        if not Path(path).is_file():
            raise ConfigError(f"{path}: no ledger is here; `dips init` makes one")
        with ExitStack() as held:
            if not readonly:
                held.enter_context(hold_ledger(path))
            db = held.enter_context(_connect_file(path, "ro" if readonly else "rw"))
            _check_is_ours(db, path)
            if verified:
                verify_pages(db, str(path))
                verify_chain(db, str(path))
            _view_as_newest(db)
            if not readonly:
                _write_durably(db)
            return cls(db, held.pop_all(), wall)

    def start_term(self, above: int = 0) -> int:
        """Begin a master's term: above `above` and every earlier one, durable on return (docs/rationale.md#4)."""
        with _in_transaction(self._db) as rows:
            term = max(self.read_term(), above) + 1
            rows.insert_row("terms", (term, self._wall()))
        self._term = term
        return self._term

    def read_term(self) -> int:
        """Return the newest term that has begun; 0 if none has."""
        (term,) = self._db.execute("SELECT coalesce(max(term), 0) FROM terms").fetchone()
        return int(term)

    def count_transactions(self, term: int) -> int:
        """Return how many transactions were written since a term began."""
        return count_transactions_after(self._db, "terms", term)

    def write_records(self, records: Sequence[Record], wall: float | None = None) -> None:
        """Make all records durable in one transaction, in their order; on any error none of them is written.

        wall  Unix seconds for the rows; None: of the clock

        The record of a raised protocol changes the tables; the file as it was is kept beside, as FORMER says.

        Raise StaleTerm if a later master has begun its term here: not every file system supports locks, and a master
        that was stopped and taken for dead must not write over its successor (docs/rationale.md#4).
        """
        raised = next((record.protocol for record in records if isinstance(record, ProtocolRaised)), 0)
        if raised:
            _keep_former(self._db, raised - 1)
        with _in_transaction(self._db) as rows:
            if self._term and (newest := self.read_term()) != self._term:
                raise StaleTerm(f"this master began term {self._term} of the ledger, term {newest} has begun since")
            at = self._wall() if wall is None else wall
            for record in records:
                write_record(rows, record, at)

    def copy_to(self, path: Path) -> None:
        """Write the whole file, with the contents of its WAL, to another one, which is replaced; it is not durable."""
        _copy_whole(self._db, path)

    def read_state(self) -> LedgerState:
        """Return the state from which a new master starts; raise Corrupt if rows contradict each other."""
        with _one_moment(self._db):
            return read_state(self._db)

    def run_row(self) -> RunRow:
        """Return the row that `dips init` wrote; raise Corrupt if it did not finish."""
        return read_run(self._db)

    def read_history(self, limit: int = 100) -> list[RoundHistory]:
        """Return the newest `limit` rounds, oldest first: how each ended, its folds and its outcomes."""
        with _one_moment(self._db):
            return read_history(self._db, limit)

    def read_newest(self) -> list[RoundHistory]:
        """Return the rounds of the newest durable version and of the newest one, of those that are not undone."""
        with _one_moment(self._db):
            return read_newest(self._db)

    def read_rounds_after(self, number: int, limit: int, *, with_result: bool = False) -> list[RoundHistory]:
        """Return the first `limit` rounds above `number`, oldest first; or those whose version has a VersionResult."""
        read = read_results_after if with_result else read_rounds_after
        with _one_moment(self._db):
            return read(self._db, number, limit)

    def find_round_before(self, count: int) -> int:
        """Return the number of the round before the newest `count` ones; 0 if there is none."""
        return ledger_history.find_round_before(self._db, count)

    def find_unprocessed(self, every: int) -> VersionId | None:
        """Return the next version for `master.on_version`: each `every`-th one gets a VersionResult."""
        return find_unprocessed(self._db, every)

    def read_digests(self) -> dict[tuple[int, str], str]:
        """Return (round, slave) → digest of the manifest of that slave's snapshot."""
        return ledger_history.read_digests(self._db)

    def read_rebalances(self) -> list[ledger_history.RebalanceHistory]:
        """Return every `dips rebalance`, oldest first."""
        with _one_moment(self._db):
            return ledger_history.read_rebalances(self._db)

    def read_extensions(self) -> list[ledger_history.ExtensionHistory]:
        """Return the targets of `dips init`, then those of every `dips set`, oldest first."""
        return ledger_history.read_extensions(self._db)

    def read_audit(self, limit: int = 100) -> list[OperatorActed]:
        """Return the newest `limit` requests of operators, oldest first, with caller and outcome."""
        return ledger_history.read_audit(self._db, limit)

    def read_tunings(self) -> list[ledger_history.TuningHistory]:
        """Return every key that `dips set` changed, oldest first."""
        return ledger_history.read_tunings(self._db)

    def read_tokens(self) -> dict[str, dict[str, int]]:
        """Return tokens accepted (in the lineage), gated, lost and undone for each known cluster."""
        return {
            t.cluster: {
                "accepted": t.tokens_accepted,
                "gated": t.tokens_gated,
                "lost": t.tokens_lost,
                "undone": t.tokens_undone,
            }
            for t in read_totals(self._db)
        }

    def close(self) -> None:
        """Close the file and release the lock. Idempotent."""
        self._held.close()


def hold_ledger(path: Path | str) -> AbstractContextManager[object]:
    """Lock a ledger's file against masters until the context ends, by `<ledger>.lock`; one in memory has no lock.

    Raise ConfigError if another process holds it.
    """
    if str(path) == MEMORY:
        return nullcontext()
    make_directory(Path(path).parent)
    busy = f"{path}: this ledger is in use by another master"
    return closing(PidLock(Path(f"{path}.lock"), busy=busy, advice="stop it first"))


def put_in_place(built: Path, path: Path) -> None:
    """Rename a closed ledger file to its final name, durably; the caller holds the lock of that name.

    SQLite's WAL beside a former file of that name is removed first: it would be applied to this one. Raise FailedDisk
    if this one's is still beside it: SQLite says nothing when it finds no room to move that into the file.
    """
    if Path(f"{built}-wal").exists():
        raise FailedDisk(f"{built}: its WAL could not be moved into it")
    sync_path(built)
    remove_beside(path)
    built.rename(path)
    sync_path(path.parent)


def remove_beside(path: Path) -> None:
    """Remove the WAL of a ledger that is gone, durably."""
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    sync_path(path.parent)


# ---- opening ------------------------------------------------------------------------------------------------------


def _connect_file(path: Path | str, mode: str) -> closing[sqlite3.Connection]:
    target = MEMORY if str(path) == MEMORY else f"{Path(path).absolute().as_uri()}?mode={mode}"
    try:
        return closing(sqlite3.connect(target, uri=True, isolation_level=None, timeout=BUSY_S, check_same_thread=False))
    except sqlite3.OperationalError as error:
        refuse_failing(error, str(path))
        raise


def _write_durably(db: sqlite3.Connection) -> None:
    """Configure durable writes, after verification, since these pragmas read the file's tables."""
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
    except sqlite3.OperationalError as error:
        refuse_failing(error, _path_of(db))
        raise


def _check_is_ours(db: sqlite3.Connection, path: Path | str) -> None:
    """Raise Corrupt for a foreign file, ConfigError for a ledger of another format."""
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (schema,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        refuse_failing(error, str(path))
        raise Corrupt(f"{path}: this is not a ledger of Di-PS: {error}") from error
    if application != APPLICATION_ID:
        raise Corrupt(f"{path}: this SQLite file is not a ledger of Di-PS (application id {application:#x})")
    if schema not in FORMATS:
        raise ConfigError(
            f"{path}: expected ledger format {' or '.join(map(str, FORMATS))}, got {schema}; go on with the Di-PS that "
            "wrote it, or begin a new run from its `dips export`"
        )


def _view_as_newest(db: sqlite3.Connection) -> None:
    """Let queries see the tables of the newest format, by views that last as long as the connection. Idempotent."""
    (form,) = db.execute("PRAGMA user_version").fetchone()
    if lacking := lacking_in(form):
        db.execute("PRAGMA temp_store = MEMORY")
    for name, select in lacking.items():
        db.execute(f"CREATE TEMP VIEW IF NOT EXISTS {name} AS {select}")


def lack_room(path: Path) -> str:
    """Return why `dips finalise` has no room for the copy of this ledger that it keeps; empty if it has. In the middle
    of the transaction a full disk would end the master, at each try.
    """
    needed = sum(file.stat().st_size for file in (path, path.with_name(path.name + "-wal")) if file.exists())
    free = shutil.disk_usage(path.parent).free
    if free >= needed + SPARE_BYTES:
        return ""
    return f"{path.parent}: expected {needed + SPARE_BYTES} free bytes, for a copy of the ledger, got {free}"


def _keep_former(db: sqlite3.Connection, form: int) -> None:
    """Copy the ledger's file, for who must go back to the release before; a copy of an earlier try is replaced."""
    path = Path(_path_of(db))
    if str(path) == MEMORY:
        return
    kept = path.with_name(path.stem + FORMER.format(form))
    aside = kept.with_suffix(".tmp")
    _copy_whole(db, aside)
    sync_path(aside)
    aside.replace(kept)
    sync_path(path.parent)


def _copy_whole(db: sqlite3.Connection, path: Path) -> None:
    """Write a ledger's file to another one, which is replaced; one that fails leaves no part, which would keep the last
    room of the ledger's own disk.
    """
    path.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(path)) as copy:
            copy.execute("PRAGMA synchronous = OFF")
            db.backup(copy)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, sqlite3.OperationalError):
            refuse_failing(error, str(path))
        raise


@contextmanager
def _in_transaction(db: sqlite3.Connection) -> Iterator[ChainedRows]:
    """Write all rows of the body in one chained, durable transaction, or none; raise FailedDisk if the disk fails."""
    try:
        db.execute("BEGIN IMMEDIATE")
        rows = ChainedRows(db)
        yield rows
        rows.write_link()
        db.execute("COMMIT")
    except BaseException as error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError):
            refuse_failing(error, _path_of(db))
        raise


def _path_of(db: sqlite3.Connection) -> str:
    (_, _, path), *_ = db.execute("PRAGMA database_list")
    return path or MEMORY


@contextmanager
def _one_moment(db: sqlite3.Connection) -> Iterator[None]:
    """Give all queries of the body the same snapshot of the rows, whatever a running master commits meanwhile."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("ROLLBACK")  # nothing was written
