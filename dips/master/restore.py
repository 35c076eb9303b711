"""Rebuilds a lost ledger from its mirror's files or a copy, when a master starts without one on its disk."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from dips.config import RunFile
from dips.dataclass import dataclass, replace
from dips.errors import ConfigError, Corrupt, FailedMirror
from dips.master import genesis
from dips.master.ledger import Ledger, hold_ledger, put_in_place, remove_beside
from dips.master.ledger_chain import refuse_damage
from dips.plain import from_plain, to_plain
from dips.protocol import codec
from dips.protocol.enums import RoundResult
from dips.protocol.records import LedgerRestored, LedgerState, Record, RoundEnded, RoundReserved
from dips.protocol.standby import SeenLease, TermLease
from dips.store.files import ASIDE
from dips.store.mirror import MirrorStore, fetch_sealed_file, insist, read_sealed, seal, write_sealed_file
from dips.tasks import call_apart
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
    """The contents of a ledger's mirror: a base, which is a file of this disk, and the transactions since."""

    term: int
    base: Path
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
# All are sealed (dips/store/mirror.py). A ledger is the newest base of the newest term with every transaction that
# follows it without a gap.


FOLDER = "ledger"
MOST_LOG_BYTES = 256 << 20  # a transaction of a run with thousands of clusters has some MB
MOST_LEASE_BYTES = 1 << 16
MOST_NUMBER = 10**10 - 1  # of ten digits
_NAME = re.compile(r"(\d{10})-(\d{10})\.(base|log|term)")


def newest_term(store: MirrorStore) -> int:
    """Return the newest term with a file in the mirror; 0 if there is none."""
    return _find_last(_list_files(store))[0]


def write_base(store: MirrorStore, run: str, term: int, number: int, base: Path) -> None:
    """Write a base, then remove all files of this and earlier terms that it replaces, and bases that were never
    finished: a crash leaves as much as the ledger has.
    """
    name = f"{term:010d}-{number:010d}.base"
    write_sealed_file(store, run, f"{FOLDER}/{name}", base)
    newest = {"term": (term - 1, MOST_NUMBER)}  # that it replaces; of other kinds: those of its own number
    found = [(m[0], m[3], (int(m[1]), int(m[2]))) for m in _list_files(store)]
    former = [file for file, kind, at in found if at <= newest.get(kind, (term, number)) and file != name]
    unfinished = insist(lambda: store.list_names(FOLDER, unfinished=True))
    torn = [file for file in unfinished if file.endswith(".base") and file <= ASIDE + name]
    _remove(store, former + torn)


def write_transaction(store: MirrorStore, run: str, term: int, number: int, written: MirroredTransaction) -> None:
    """Write the file of one transaction."""
    content = json.dumps([written.wall, codec.encode_value(written.records)], separators=(",", ":")).encode()
    insist(lambda: store.write_file(f"{FOLDER}/{_name_log(term, number)}", seal(run, content)))


def read_newest(store: MirrorStore, run: str, base: Path) -> MirroredLedger | None:
    """Return the newest complete ledger in the mirror, None if there is none; its base is written to the file `base`.

    A master that is cut off may still write there: if it replaces files meanwhile, they are read again. Raise Corrupt
    if a file is of another run, or cannot be decoded, or is missing before others that follow it.
    """
    while True:
        bases = _list_bases(store)
        found, number = _read_first(store, run, bases, base)
        files = _list_files(store)
        if bases == _bases_of(files):
            break
    if found is None and bases:
        raise Corrupt(
            f"{store.url}/{FOLDER}: none of its {len(bases)} bases is whole: put one back, or move this folder away "
            "and go on without it (docs/guides/operations.md#restore)"
        )
    if found is not None:
        _check_is_last(store, found.term, number, files)
    return found


def _check_is_last(store: MirrorStore, term: int, number: int, files: Sequence[re.Match[str]]) -> None:
    """Raise Corrupt if transactions follow the one behind this number, which was not whole: only the last one may be,
    since a master writes one after the other.
    """
    behind = [m[0] for m in files if m[3] == "log" and int(m[1]) == term and int(m[2]) > number + 1]
    if behind:
        name = f"{FOLDER}/{_name_log(term, number + 1)}"
        raise Corrupt(
            f"{store.url}/{name} is not whole or gone, and {len(behind)} transactions after it are there: put it back, "
            f"or move it and all up to {max(behind)} away, and the run goes on from what was before"
        )


def _name_log(term: int, number: int) -> str:
    return f"{term:010d}-{number:010d}.log"


def _list_bases(store: MirrorStore) -> list[tuple[int, int]]:
    """Return term and number of every base, the newest first."""
    return _bases_of(_list_files(store))


def _bases_of(files: Sequence[re.Match[str]]) -> list[tuple[int, int]]:
    return sorted(((int(m[1]), int(m[2])) for m in files if m[3] == "base"), reverse=True)


def _list_files(store: MirrorStore) -> list[re.Match[str]]:
    """Return term, number and kind of every file."""
    return [match for match in map(_NAME.fullmatch, insist(lambda: store.list_names(FOLDER))) if match]


def _find_last(files: Sequence[re.Match[str]]) -> tuple[int, int]:
    """Return the newest term of these files, and the number of its newest transaction; 0 if there is none."""
    term = max((int(found[1]) for found in files), default=0)
    numbers = (int(found[2]) for found in files if int(found[1]) == term and found[3] != "term")
    return term, max(numbers, default=0)


def _remove(store: MirrorStore, names: Sequence[str]) -> None:
    insist(lambda: store.remove_files([f"{FOLDER}/{name}" for name in names]))


def _read_first(
    store: MirrorStore, run: str, bases: Sequence[tuple[int, int]], base: Path
) -> tuple[MirroredLedger | None, int]:
    """Return the first of these bases that is complete, with the transactions that follow it, and the number of the
    last.
    """
    for term, number in bases:
        if fetch_sealed_file(store, run, f"{FOLDER}/{term:010d}-{number:010d}.base", base):
            followed = tuple(_read_transactions(store, run, term, number))
            return MirroredLedger(term, base, followed), number + len(followed)
    return None, 0


def _read_transactions(store: MirrorStore, run: str, term: int, number: int) -> Sequence[MirroredTransaction]:
    """Return all transactions that follow a base without a gap."""
    followed = []
    while (content := read_sealed(store, run, f"{FOLDER}/{_name_log(term, number + 1)}", MOST_LOG_BYTES)) is not None:
        wall, spelled = json.loads(content)
        followed.append(MirroredTransaction(codec.decode_value(spelled), wall))
        number += 1
    return followed


# ---- leases ---------------------------------------------------------------------------------------------------------
# The lease of each term lies beside its transactions, and is one of the files that say which term is the newest:
#
#     0000001005-0000000000.term   made exclusively: who makes it has claimed term 1005; with each renewal the number
#     0000001005-0000000017.term   rises, so a write that comes late replaces nothing


def claim_term(store: MirrorStore, run: str, holder: str, *, claimable: bool, above: int) -> TermLease | None:
    """Claim the first term that a ledger restored from here may have, where `above` is the newest; None if another
    was faster. What the mirror has after that is all that any earlier master can have told.
    """
    lease = TermLease(above + SPARE + 1, 0, holder, claimable, uuid.uuid4().hex)  # a term that `build_file` begins
    return lease if write_lease(store, run, lease) else None


def write_lease(store: MirrorStore, run: str, lease: TermLease, claimed: bool = False) -> bool:
    """Write a lease, and before it number 0, exclusively, unless the term is `claimed`; return whether the term is its
    holder's.
    """
    if not claimed and not _claim_exclusively(store, run, replace(lease, number=0)):
        return False
    if lease.number:
        insist(lambda: store.write_file(_name_lease(lease.term, lease.number), _seal_lease(run, lease)))
    return True


def _claim_exclusively(store: MirrorStore, run: str, lease: TermLease) -> bool:
    """Make number 0 of a term; return whether it is this holder's: an answer that was lost leaves our own file, which
    may say otherwise whether a standby may claim.
    """
    name, ours = _name_lease(lease.term, 0), [_seal_lease(run, replace(lease, claimable=c)) for c in (True, False)]
    made = insist(lambda: store.create_whole(name, _seal_lease(run, lease)))
    return made or insist(lambda: store.read_file(name, MOST_LEASE_BYTES)) in ours


def _seal_lease(run: str, lease: TermLease) -> bytes:
    return seal(run, json.dumps(to_plain(lease)).encode())


def remove_leases_before(store: MirrorStore, lease: TermLease) -> None:
    """Remove the leases of this term that were written before; number 0 stays, so that the term is claimed once."""
    found = [(m[0], int(m[2])) for m in _list_files(store) if m[3] == "term" and int(m[1]) == lease.term]
    _remove(store, [file for file, number in found if 0 < number < lease.number])


def look_at_lease(store: MirrorStore, run: str) -> SeenLease:
    """Return the newest term and its lease, or what is wrong with it; raise FailedMirror if the store fails.

    One that is renewed, and so removed, between the list and the read is looked for again.
    """
    seen = _read_lease(store, run)
    while seen.problem and (again := _read_lease(store, run)) != seen:
        seen = again
    return seen


def _read_lease(store: MirrorStore, run: str) -> SeenLease:
    files = _list_files(store)
    newest, transactions = _find_last(files)
    number = max((int(m[2]) for m in files if (int(m[1]), m[3]) == (newest, "term")), default=-1)
    seen = SeenLease(newest, number, transactions=transactions)
    if number < 0:
        return seen
    name = _name_lease(newest, number)
    try:
        content = read_sealed(store, run, name, MOST_LEASE_BYTES)
        if content is None:
            return replace(seen, problem=f"{store.url}/{name}: the lease is not whole")
        lease = from_plain(TermLease, json.loads(content))
    except Corrupt as error:
        return replace(seen, problem=str(error))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return replace(seen, problem=f"{store.url}/{name}: is no lease of this version of Di-PS: {error}")
    if (lease.term, lease.number) != (newest, number):
        problem = f"{store.url}/{name}: expected the lease {newest}-{number}, got {lease.term}-{lease.number}"
        return replace(seen, problem=problem)
    return replace(seen, lease=lease)


def _name_lease(term: int, number: int) -> str:
    return f"{FOLDER}/{term:010d}-{number:010d}.term"


# ---- restore --------------------------------------------------------------------------------------------------------
# Rebuilds a lost ledger from its mirror, when a master starts without one on its disk.


RESTORING_FOLDER = ".restoring"
RESTORING = "a master that restores"  # the holder of the term of a restored ledger, which serves a later one
OLD = "ledger.old.sqlite"  # of a master whose successor serves; one is kept
LOOK_S = 30.0  # longest look at the mirror of a master that has its ledger: a mount may hang, a store may be slow


def restore_if_lost(config: RunFile, log: Log, claimed: int | None = None) -> None:
    """Restore the ledger and the initial model from the mirror if they are lost; do nothing if they exist or have no
    mirror. A term is claimed before the mirror is read, or was by the caller; the master serves a later one.

    A standby, whose term is claimed, has none of the slaves, and no time or room for their initial model.

    Raise ConfigError if the existing ledger is older than its mirror's; FailedMirror if a mirror that is needed cannot
    be read; Corrupt if it is of another run.
    """
    store, path = genesis.mirror_of(config), genesis.ledger_path(config)
    if store is None:
        return
    if path.exists():
        _check_not_older(path, store, log)
        return
    run, model = config.shared.run, claimed is None
    with hold_ledger(path):  # one master restores it, and a second one finds it
        if not _list_bases(store):
            return  # a run that has not begun
        while claimed is None:
            lease = claim_term(store, run, RESTORING, claimable=False, above=newest_term(store))
            claimed = None if lease is None else lease.term
        with make_aside(path) as base:
            found = read_newest(store, run, base)
            if found is None:
                raise Corrupt(f"{store.url}/{FOLDER}: its bases are gone")
            # First: one with a ledger is not restored.
            genesis.fetch_initial(store, run, config.master.directory, model=model)
            state = build_file(replace(found, term=claimed - SPARE - 1), path)
    log.warning(
        "ledger_restored", mirror=store.url, term=found.term, head=str(state.versions[-1].version),
        transactions_since_base=len(found.transactions),
    )  # fmt: skip


@contextmanager
def make_aside(path: Path) -> Iterator[Path]:
    """Yield the name of a file in an empty directory beside this one, which is removed in the end."""
    aside = path.parent / RESTORING_FOLDER
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside / path.name
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def build_file(found: MirroredLedger, path: Path) -> LedgerState:
    """Build the ledger in the file of its base, and rename that when it is complete."""
    try:
        ledger = Ledger.open(found.base, wall=time.time)
        try:
            state, _ = rebuild(ledger, found.term, found.transactions)
        finally:
            ledger.close()  # the last connection moves the WAL into the file
        put_in_place(found.base, path)
    except sqlite3.DatabaseError as error:
        raise Corrupt(f"the mirrored ledger cannot be built: {error}") from error
    return state


def _check_not_older(path: Path, store: MirrorStore, log: Log) -> None:
    """Raise ConfigError if the mirror has a later term than this file, or transactions of its newest term that are not
    in it: each is written here first. If not, the file on disk is the newer one.
    """
    try:
        term, number = call_apart(lambda: _find_last(_list_files(store)), "mirror-look").result(LOOK_S)
    except (FailedMirror, TimeoutError) as error:
        log.warning("ledger_mirror_lags", reason=str(error) or f"{store.url} did not answer within {LOOK_S:g} s")
        return
    ours = _find_place(path, term)
    if (term, number) > ours:
        has, there = f"knows terms up to {ours[0]}", f"has term {term}"
        if term == ours[0]:
            has, there = f"ends with transaction {ours[1]} of term {term}", f"with {number}"
        raise ConfigError(
            f"{path} {has}, its mirror {store.url} {there}: this file is an old copy; "
            "put the newest one back, or move it away to have it restored from the mirror"
        )


def set_aside_old(config: RunFile, newest: int, log: Log) -> None:
    """Move a former master's ledger away, whatever its term, so that the mirror's is restored: it is old, damaged, or
    of a run of this name that was thrown away.
    """
    path = genesis.ledger_path(config)
    if not path.exists():
        return
    try:
        with refuse_damage(str(path)):
            Ledger.open(path, wall=time.time, verified=False).close()  # moves its WAL into the file
    except Corrupt as error:
        log.warning("old_ledger_damaged", reason=str(error))  # as its machine left it; nobody reads it
    with hold_ledger(path):
        path.replace(path.with_name(OLD))
        remove_beside(path)
    log.warning("old_ledger_set_aside", ledger=str(path.with_name(OLD)), newest_term=newest)


def own_ledger_is_newest(config: RunFile, term: int, number: int) -> bool:
    """Return whether this directory's ledger has the newest term and transaction of the mirror, whose master only
    starts again.
    """
    path = genesis.ledger_path(config)
    return path.exists() and _find_place(path, term) >= (term, number)


def _find_place(path: Path, term: int) -> tuple[int, int]:
    """Return the newest term of a ledger's file and, if that is `term`, how many transactions it has since."""
    # Not verified here: the master does when it opens it.
    with (
        refuse_damage(str(path)),
        closing(Ledger.open(path, readonly=True, verified=False)) as ledger,
    ):
        newest = ledger.read_term()
        return newest, ledger.count_transactions(newest) if newest == term else 0
