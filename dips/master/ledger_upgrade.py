"""Brings a ledger of an older format to today's: in place when a master opens it, in memory when it is only read.

One transaction: after a crash the file is of one format or the other. What an older format did not say is what its
Di-PS did.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from dips.master.schema import CHAIN, SCHEMA_VERSION

# Format → what makes the next one of it. Every step was Nesterov's then; lr 0 is of versions that no pushes made.
UPGRADES: Mapping[int, tuple[str, ...]] = {
    8: (
        "ALTER TABLE versions RENAME COLUMN momentum TO a",
        "ALTER TABLE versions ADD COLUMN b REAL",
        "ALTER TABLE versions ADD COLUMN c REAL",
        "ALTER TABLE versions ADD COLUMN e REAL",
        "ALTER TABLE versions ADD COLUMN returned REAL",
        "UPDATE versions SET b = lr > 0, c = lr > 0, e = a, returned = coalesce((1 - a) / nullif(lr * a * a, 0), 0)",
        """CREATE TABLE layer_factors (
            round INTEGER NOT NULL REFERENCES versions, place INTEGER NOT NULL, factors TEXT NOT NULL,
            PRIMARY KEY (round, place)
        ) STRICT""",
        "ALTER TABLE score_history ADD COLUMN layer_norms TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE score_history ADD COLUMN digests TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE penalty ADD COLUMN loss REAL",
        "ALTER TABLE penalty ADD COLUMN loss_shift REAL",
        "UPDATE penalty SET loss_shift = 0",
        "ALTER TABLE penalty ADD COLUMN suspicion REAL NOT NULL DEFAULT 0",
        "ALTER TABLE penalty ADD COLUMN layers TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE folds ADD COLUMN anchored INTEGER NOT NULL DEFAULT 0",
    ),
    9: (
        "ALTER TABLE penalty ADD COLUMN losses INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE penalty ADD COLUMN loss_rises INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE penalty ADD COLUMN cosine REAL DEFAULT 0",
        "ALTER TABLE penalty ADD COLUMN cosines INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE penalty ADD COLUMN tokens TEXT NOT NULL DEFAULT '[]'",
        CHAIN,  # its first link takes up every row: what was flipped before stays so
    ),
}


def is_upgradable(format_: int) -> bool:
    """Whether today's format can be made of this one, or it is that."""
    return format_ <= SCHEMA_VERSION and all(number in UPGRADES for number in range(format_, SCHEMA_VERSION))


def upgrade_ledger(db: sqlite3.Connection) -> None:
    """Make today's format of it; inside the caller's transaction."""
    (number,) = db.execute("PRAGMA user_version").fetchone()
    for statements in (UPGRADES[i] for i in range(number, SCHEMA_VERSION)):
        for statement in statements:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def copy_to_memory(db: sqlite3.Connection) -> sqlite3.Connection:
    """A copy that may be upgraded, of a ledger that may not."""
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.backup(copy)
    db.close()
    return copy
