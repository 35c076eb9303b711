"""Rebuilds a lost ledger from its mirror, when a master starts without one on its disk."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from dips.config import RunFile
from dips.errors import ConfigError, Corrupt, FailedMirror
from dips.master import genesis, mirror_files
from dips.master.ledger import Ledger, hold_ledger, put_in_place
from dips.master.ledger_rebuild import MirroredLedger, rebuild
from dips.mirror import MirrorStore
from dips.protocol.records import LedgerState
from dips.telemetry.logs import Log

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
        found = mirror_files.read_newest(store, config.shared.run)
        if found is None:
            return  # a run that has not begun
        genesis.fetch_initial(store, config.master.directory)  # first: a directory with a ledger is not restored
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
    """Raise ConfigError if a later master than this file knows has written to the mirror; otherwise the disk counts."""
    try:
        mirrored = mirror_files.newest_term(store)
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
