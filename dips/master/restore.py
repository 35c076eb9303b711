"""Rebuilds a lost ledger from its mirror's files or a copy, when a master starts without one on its disk."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import xxhash

from dips.config import RunFile
from dips.dataclass import dataclass
from dips.errors import ConfigError, Corrupt, FailedMirror
from dips.master import genesis
from dips.master.ledger import Ledger, hold_ledger, put_in_place
from dips.protocol import codec
from dips.protocol.enums import RoundResult
from dips.protocol.records import LedgerRestored, LedgerState, Record, RoundEnded, RoundReserved
from dips.store.mirror import MirrorStore
from dips.telemetry.logs import Log

# ---- ledger rebuild -------------------------------------------------------------------------------------------------
# Rebuilds a ledger from a copy and the transactions since, and raises its counters.
#
# While a mirror keeps up, nothing is acknowledged that is not in it. It may have lagged, or have been gone without a
# trace of that. So names that may have been given since are not given again: the term rises, rounds and incarnations
# leave a gap; live clusters and slaves keep the incarnations in the ledger. Slaves are the witnesses: one that holds a
# version of a round in the gap makes the master refuse to serve, and recommend `dips-master recover`
# (docs/rationale.md#2, #4).


SPARE = 1_000  # numbers skipped above the highest that was found: skipped rounds leave no trace on disks
REASON = "the ledger was restored from its mirror"


@dataclass(frozen=True, slots=True)
class MirroredTransaction:
    """The records of one transaction, and their time."""

    records: tuple[Record, ...]
    wall: float


@dataclass(frozen=True, slots=True)
class MirroredLedger:
    """The contents of a ledger's mirror: a base, and the transactions since."""

    term: int
    base: bytes
    transactions: tuple[MirroredTransaction, ...]


def rebuild(ledger: Ledger, term: int, transactions: Sequence[MirroredTransaction]) -> tuple[LedgerState, list[Record]]:
    """Apply all mirrored transactions to a base and leave gaps above; return the state before the gaps, and their
    records.
    """
    for transaction in transactions:
        ledger.write_records(transaction.records, transaction.wall)
    state = ledger.read_state()
    raised = _gap_records(state)
    ledger.write_records(raised)
    ledger.start_term(above=max(term, state.term) + SPARE)
    return state, raised


def _gap_records(state: LedgerState) -> list[Record]:
    """Return the records that leave a gap in rounds and incarnations above those that the copy has."""
    low, high = state.next_round, state.next_round + SPARE
    incarnations = [peer.inc for peer in (*state.slaves, *state.clusters)]
    above = max((*incarnations, state.incarnations_above)) + SPARE
    ended = RoundEnded(high, RoundResult.SKIPPED, REASON, (), (), 0.0)
    return [LedgerRestored(REASON, low, high, above), RoundReserved(high, 0.0), ended]


# ---- mirror files ---------------------------------------------------------------------------------------------------
# The files of a ledger's mirror, `<mirror>/<run>/master/ledger/`: bases and the transactions since.
#
#     0000000003-0000000120.base   the ledger's file as it was in term 3, after the 120th transaction of that term
#     0000000003-0000000121.log    the records of the 121st, encoded by codec.py, with their wall-clock time
#
# Each begins with one line of JSON: format, run, and the length and xxh3-128 of the rest; a file that does not match
# its line is incomplete and is not used. A ledger is the newest base of the newest term with every transaction that
# follows it without a gap.


FORMAT = 1
FOLDER = "ledger"
MOST_LOG_BYTES = 256 << 20  # a transaction of a run with thousands of clusters has some MB
MOST_BASE_BYTES = 64 << 30
_NAME = re.compile(r"(\d{10})-(\d{10})\.(base|log)")


def newest_term(store: MirrorStore) -> int:
    """Return the newest term with a file in the mirror; 0 if there is none."""
    return max((int(found[1]) for found in map(_NAME.fullmatch, store.list_names(FOLDER)) if found), default=0)


def write_base(store: MirrorStore, run: str, term: int, number: int, content: bytes) -> None:
    """Write a base, then remove all files of this and earlier terms that it replaces."""
    name = f"{term:010d}-{number:010d}.base"
    store.write_file(f"{FOLDER}/{name}", _seal_content(run, content))
    for other in store.list_names(FOLDER):
        found = _NAME.fullmatch(other)
        if found and other != name and (int(found[1]), int(found[2])) <= (term, number):
            store.remove_path(f"{FOLDER}/{other}")


def write_transaction(store: MirrorStore, run: str, term: int, number: int, written: MirroredTransaction) -> None:
    """Write the file of one transaction."""
    content = json.dumps([written.wall, codec.encode_value(written.records)], separators=(",", ":")).encode()
    store.write_file(f"{FOLDER}/{term:010d}-{number:010d}.log", _seal_content(run, content))


def read_newest(store: MirrorStore, run: str) -> MirroredLedger | None:
    """Return the newest complete ledger in the mirror, None if there is none.

    A master that is cut off may still write there: if it replaces files meanwhile, they are read again. Raise Corrupt
    if a file is of another run, or cannot be decoded.
    """
    while True:
        bases = _list_bases(store)
        found = _read_first(store, run, bases)
        if bases == _list_bases(store):
            break
    if found is None and bases:
        raise Corrupt(f"{store.url}/{FOLDER}: none of its {len(bases)} bases is whole")
    return found


def _list_bases(store: MirrorStore) -> list[tuple[int, int]]:
    """Return term and number of every base, the newest first."""
    found = [match for match in map(_NAME.fullmatch, store.list_names(FOLDER)) if match and match[3] == "base"]
    return sorted(((int(m[1]), int(m[2])) for m in found), reverse=True)


def _read_first(store: MirrorStore, run: str, bases: Sequence[tuple[int, int]]) -> MirroredLedger | None:
    """Return the first of these bases that is complete, with the transactions that follow it."""
    for term, number in bases:
        base = _read_sealed(store, run, f"{term:010d}-{number:010d}.base", MOST_BASE_BYTES)
        if base is not None:
            return MirroredLedger(term, base, tuple(_read_transactions(store, run, term, number)))
    return None


def _read_transactions(store: MirrorStore, run: str, term: int, number: int) -> Sequence[MirroredTransaction]:
    """Return all transactions that follow a base without a gap; the last one may be incomplete if its master ended."""
    followed = []
    while (content := _read_sealed(store, run, f"{term:010d}-{number + 1:010d}.log", MOST_LOG_BYTES)) is not None:
        wall, spelled = json.loads(content)
        followed.append(MirroredTransaction(codec.decode_value(spelled), wall))
        number += 1
    return followed


def _seal_content(run: str, content: bytes) -> bytes:
    head = {"format": FORMAT, "run": run, "bytes": len(content), "xxh3": xxhash.xxh3_128_hexdigest(content)}
    return json.dumps(head).encode() + b"\n" + content


def _read_sealed(store: MirrorStore, run: str, name: str, most: int) -> bytes | None:
    """Return the content of a file; None if there is none, or it is incomplete."""
    raw = store.read_file(f"{FOLDER}/{name}", most)
    if raw is None:
        return None
    line, _, content = raw.partition(b"\n")
    where = f"{store.url}/{FOLDER}/{name}"
    try:
        head = json.loads(line)
        whole = (len(content), xxhash.xxh3_128_hexdigest(content)) == (head["bytes"], head["xxh3"])
        written_by, of = head["format"], head["run"]
    except (ValueError, KeyError, TypeError):
        return None  # incomplete within its first line
    if not whole:
        return None
    if written_by != FORMAT:
        raise Corrupt(
            f"{where}: expected a mirror of format {FORMAT}, got {written_by!r}; restore it with the Di-PS that "
            "wrote it, or begin a new run from its `dips export`"
        )
    if of != run:
        raise Corrupt(f"{where}: expected the ledger of run {run!r}, got one of {of!r}")
    return content


# ---- restore --------------------------------------------------------------------------------------------------------
# Rebuilds a lost ledger from its mirror, when a master starts without one on its disk.


ASIDE = ".restoring"


def mirror_of(config: RunFile) -> MirrorStore | None:
    """Return the mirror of this run's ledger; None if it has none."""
    url, directory = config.master.mirror, config.master.directory
    return None if url is None else MirrorStore(url, config.shared.run, "master", of=directory)


def restore_if_lost(config: RunFile, log: Log) -> None:
    """Restore the ledger and the initial model from the mirror if they are lost; do nothing if they exist or have no
    mirror.

    Raise ConfigError if the existing ledger is older than its mirror's; FailedMirror if a mirror that is needed cannot
    be read; Corrupt if it is of another run.
    """
    store, path = mirror_of(config), genesis.ledger_path(config)
    if store is None:
        return
    if path.exists():
        _check_not_older(path, store, log)
        return
    with hold_ledger(path):  # one master restores it, and a second one finds it
        found = read_newest(store, config.shared.run)
        if found is None:
            return  # a run that has not begun
        genesis.fetch_initial(
            store, config.shared.run, config.master.directory
        )  # first: a directory with a ledger is not restored
        state = build_file(found, path)
    log.warning(
        "ledger_restored", mirror=store.url, term=found.term, head=str(state.versions[-1].version),
        transactions_since_base=len(found.transactions),
    )  # fmt: skip


def build_file(found: MirroredLedger, path: Path) -> LedgerState:
    """Build the ledger's file aside, and rename it when it is complete."""
    aside = path.parent / ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    built = aside / path.name
    try:
        built.write_bytes(found.base)
        ledger = Ledger.open(built, wall=time.time)
        try:
            state, _ = rebuild(ledger, found.term, found.transactions)
        finally:
            ledger.close()  # the last connection moves the WAL into the file
        put_in_place(built, path)
        return state
    except sqlite3.DatabaseError as error:
        raise Corrupt(f"the mirrored ledger cannot be built: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_not_older(path: Path, store: MirrorStore, log: Log) -> None:
    """Raise ConfigError if a master of a later term than this file knows has written to the mirror. If not, the file
    on disk is the newer one.
    """
    try:
        mirrored = newest_term(store)
    except FailedMirror as error:
        log.warning("ledger_mirror_lags", reason=str(error))
        return
    with closing(Ledger.open(path, readonly=True, verified=False)) as ledger:  # the master verifies it when it opens it
        term = ledger.read_term()
    if mirrored > term:
        raise ConfigError(
            f"{path} knows terms up to {term}, its mirror {store.url} has term {mirrored}: this file is an old copy; "
            "put the newest one back, or move it away to have it restored from the mirror"
        )
