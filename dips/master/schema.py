"""The ledger's tables. A run's ledger has the format of the protocol that the run speaks (dips/protocol/releases.py):
FIRST are the tables of protocol 1, and RAISES says what each later one added.

Rows are added and never changed; only `score_history` is one row, replaced by each commit, and `finished`, which a run
reaches again after a rollback. A version is undone if `undone` has its round. `chain` has a hash of every row:
ledger_chain.py.

`at` is the time of the decision on the master's monotonic clock; `wall` is Unix seconds, for people and plots. SQLite
stores NaN as NULL, so columns of reals are not NOT NULL; a loss that no script gave is NULL, too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from typing import NamedTuple

from dips.protocol.releases import OLDEST_PROTOCOL, PROTOCOL

APPLICATION_ID = 0x44695053  # "DiPS" in the file's header: other SQLite files are foreign
FORMATS = range(OLDEST_PROTOCOL, PROTOCOL + 1)  # that this release opens; a file's own is in its user_version

# Never edited: ledgers of release 0.1.0 have these, bit for bit, and the chain has their digest.
FIRST = """
CREATE TABLE run (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    run TEXT NOT NULL, config_digest TEXT NOT NULL, manifest TEXT NOT NULL
) STRICT;
CREATE TABLE placement (place INTEGER PRIMARY KEY, slave TEXT NOT NULL UNIQUE, layers TEXT NOT NULL) STRICT;
CREATE TABLE genesis (layer INTEGER PRIMARY KEY, digest TEXT NOT NULL, norm REAL) STRICT;

CREATE TABLE terms (term INTEGER PRIMARY KEY, wall REAL) STRICT;
CREATE TABLE incarnations (
    role TEXT NOT NULL CHECK (role IN ('cluster', 'slave')),
    name TEXT NOT NULL, inc INTEGER NOT NULL, nonce TEXT NOT NULL,
    PRIMARY KEY (role, name, inc)
) STRICT;
CREATE TABLE incarnations_ended (
    cluster TEXT NOT NULL, inc INTEGER NOT NULL, reason TEXT NOT NULL, tokens_lost INTEGER NOT NULL, at REAL, wall REAL,
    PRIMARY KEY (cluster, inc)
) STRICT;

CREATE TABLE rounds (round INTEGER PRIMARY KEY, at REAL, wall REAL) STRICT;
CREATE TABLE round_ends (
    round INTEGER PRIMARY KEY REFERENCES rounds,
    kind TEXT NOT NULL CHECK (kind IN ('applied', 'skipped', 'unchanged')),
    reason TEXT NOT NULL, at REAL, wall REAL
) STRICT;
CREATE TABLE versions (
    round INTEGER PRIMARY KEY, version INTEGER NOT NULL,
    parent_version INTEGER NOT NULL, parent_round INTEGER NOT NULL,
    durable INTEGER NOT NULL, tokens INTEGER NOT NULL,
    scale REAL, lr REAL, a REAL, delta_norm REAL, clipped INTEGER NOT NULL, b REAL, c REAL, e REAL, returned REAL
) STRICT;
-- where layers differ, in manifest order: the weights of the fold in this place, or with place −1 the scales of the
-- step; elsewhere `folds.weight` and `versions.scale` hold for all layers. One number: of all of them
CREATE TABLE layer_factors (
    round INTEGER NOT NULL REFERENCES versions, place INTEGER NOT NULL, factors TEXT NOT NULL,
    PRIMARY KEY (round, place)
) STRICT;
CREATE TABLE digests (
    round INTEGER NOT NULL REFERENCES versions, slave TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (round, slave)
) STRICT;
CREATE TABLE retired (round INTEGER PRIMARY KEY REFERENCES versions) STRICT;

CREATE TABLE folds (
    round INTEGER NOT NULL REFERENCES versions, place INTEGER NOT NULL,
    cluster TEXT NOT NULL, inc INTEGER NOT NULL, seq INTEGER NOT NULL,
    base_version INTEGER NOT NULL, base_round INTEGER NOT NULL,
    tokens INTEGER NOT NULL, inner_steps INTEGER NOT NULL,
    weight REAL, norm REAL, score REAL, loss REAL, ranges TEXT NOT NULL,
    PRIMARY KEY (round, place),
    UNIQUE (cluster, inc, seq)  -- once: no push is in two versions (docs/architecture.md#invariant-4)
) STRICT;
CREATE TABLE outcomes (
    place INTEGER PRIMARY KEY, round INTEGER NOT NULL REFERENCES rounds,
    cluster TEXT NOT NULL, inc INTEGER NOT NULL, seq INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('accepted', 'gated', 'skipped')),
    reason TEXT NOT NULL, tokens INTEGER NOT NULL, inner_steps INTEGER NOT NULL,
    norm REAL, score REAL, ranges TEXT NOT NULL,
    begun TEXT NOT NULL  -- [number, done, of] of the range after those, trained in part; or []
) STRICT;
CREATE INDEX outcomes_by_cluster ON outcomes (cluster, place);

CREATE TABLE penalty (
    place INTEGER PRIMARY KEY, round INTEGER NOT NULL,
    cluster TEXT NOT NULL, n INTEGER NOT NULL, mu REAL, sigma REAL, last_norm REAL,
    warm_left INTEGER NOT NULL, gated_in_a_row INTEGER NOT NULL, quarantined INTEGER NOT NULL,
    accepted INTEGER NOT NULL, reference REAL, steps REAL, broken INTEGER NOT NULL,
    loss REAL, loss_shift REAL, suspicion REAL NOT NULL DEFAULT 0,
    layers TEXT NOT NULL DEFAULT '[]',  -- [n, mu, sigma, left out in a row] of each
    losses INTEGER NOT NULL DEFAULT 0, loss_rises INTEGER NOT NULL DEFAULT 0,
    cosine REAL DEFAULT 0, cosines INTEGER NOT NULL DEFAULT 0, tokens TEXT NOT NULL DEFAULT '[]'
) STRICT;
CREATE INDEX penalty_by_cluster ON penalty (cluster, place);
CREATE TABLE score_history (
    only INTEGER PRIMARY KEY CHECK (only = 1), scores TEXT NOT NULL, delta_norms TEXT NOT NULL,
    digests TEXT NOT NULL DEFAULT '[]'
) STRICT;

CREATE TABLE leases (
    place INTEGER PRIMARY KEY, cluster TEXT NOT NULL, inc INTEGER NOT NULL, seq INTEGER NOT NULL, ranges TEXT NOT NULL,
    UNIQUE (cluster, inc, seq)
) STRICT;
CREATE TABLE finished (
    only INTEGER PRIMARY KEY CHECK (only = 1), version INTEGER NOT NULL, round INTEGER NOT NULL,
    reason TEXT NOT NULL, at REAL, wall REAL
) STRICT;
-- how far the run goes: as `dips init` read it, then a row for each `dips set`; `resumed` is where it was finished
CREATE TABLE targets (
    place INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, versions INTEGER NOT NULL, wall_s REAL NOT NULL,
    epochs INTEGER NOT NULL, resumed TEXT NOT NULL, last_round INTEGER NOT NULL, at REAL, wall REAL
) STRICT;
-- what `dips set` changed, a row for each key; `value` NULL: off
CREATE TABLE tunings (
    place INTEGER PRIMARY KEY, key TEXT NOT NULL, value REAL, last_round INTEGER NOT NULL, at REAL, wall REAL
) STRICT;
-- what `dips cluster quarantine` said, newest last; an empty reason releases
CREATE TABLE quarantines (
    place INTEGER PRIMARY KEY, cluster TEXT NOT NULL, reason TEXT NOT NULL, last_round INTEGER NOT NULL, at REAL,
    wall REAL
) STRICT;
-- who asked what as an operator, and what came of it; `asked` is the shell's time, `passed_over` counts requests before
-- this one that changed nothing and were too many for rows of their own
CREATE TABLE audit (
    place INTEGER PRIMARY KEY, asked REAL, caller TEXT NOT NULL, action TEXT NOT NULL, arguments TEXT NOT NULL,
    outcome TEXT NOT NULL, refused INTEGER NOT NULL, passed_over INTEGER NOT NULL, wall REAL
) STRICT;
CREATE TABLE durable (round INTEGER PRIMARY KEY REFERENCES versions, at REAL, wall REAL) STRICT;
CREATE TABLE rollbacks (
    place INTEGER PRIMARY KEY, head_version INTEGER NOT NULL, head_round INTEGER NOT NULL,
    reason TEXT NOT NULL, at REAL, wall REAL
) STRICT;
CREATE TABLE undone (
    round INTEGER PRIMARY KEY REFERENCES versions, rollback INTEGER NOT NULL REFERENCES rollbacks
) STRICT;
-- `dips rebalance`: from this version on the layers lie as `rebalanced` says, not as `placement` does
CREATE TABLE rebalances (
    place INTEGER PRIMARY KEY, round INTEGER NOT NULL REFERENCES versions, last_round INTEGER NOT NULL, wall REAL
) STRICT;
CREATE TABLE rebalanced (
    rebalance INTEGER NOT NULL REFERENCES rebalances, place INTEGER NOT NULL,
    slave TEXT NOT NULL, layers TEXT NOT NULL, digest TEXT,
    PRIMARY KEY (rebalance, place), UNIQUE (rebalance, slave)
) STRICT;
-- a copy took the place of a lost ledger, or an operator raised its counters: rounds from `unknown_from` to below
-- `known_again` may have been used and are in no row; incarnations to come are above `incarnations_above`
CREATE TABLE restores (
    place INTEGER PRIMARY KEY, source TEXT NOT NULL, unknown_from INTEGER NOT NULL, known_again INTEGER NOT NULL,
    incarnations_above INTEGER NOT NULL, wall REAL
) STRICT;
-- a version that an operator made of a file (`dips recover`); `layers` lost their momentum
CREATE TABLE recoveries (
    round INTEGER PRIMARY KEY REFERENCES versions, source TEXT NOT NULL, layers TEXT NOT NULL, wall REAL
) STRICT;
-- what the process of `master.on_version` said of a version; `numbers` is a JSON object
CREATE TABLE version_results (
    round INTEGER PRIMARY KEY REFERENCES versions, ok INTEGER NOT NULL, reason TEXT NOT NULL, numbers TEXT NOT NULL,
    seconds REAL, wall REAL
) STRICT;
-- the committed push of an incarnation that ended before its Outcome
CREATE TABLE left_open (
    cluster TEXT NOT NULL, inc INTEGER NOT NULL, seq INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (cluster, inc)
) STRICT;
"""
CHAIN = """CREATE TABLE chain (number INTEGER PRIMARY KEY, rows BLOB NOT NULL, hash BLOB NOT NULL) STRICT"""
REPLACED = frozenset({"finished", "score_history", "version_results"})  # by a row of the same key


class Raise(NamedTuple):
    """The tables and columns that a protocol added.

    statements  make the tables and columns of this format of those of the one before: CREATE TABLE, ALTER TABLE … ADD
    lacking     views through which this release reads a ledger of the one before: name → SELECT. A table that is new
                has its first rows; one with new columns is `SELECT *, 0 AS new FROM main.name`
    """

    statements: str
    lacking: Mapping[str, str]


RAISES = {
    2: Raise(
        statements="""
-- the protocol that the run spoke at first, then a row for each `dips finalise`
CREATE TABLE protocols (protocol INTEGER PRIMARY KEY, at REAL, wall REAL) STRICT;
-- digest of a cluster's frozen parameters; empty: it has none, or they are not known
ALTER TABLE incarnations ADD COLUMN frozen_digest TEXT NOT NULL DEFAULT '';
""",
        lacking={
            "protocols": "SELECT 1 AS protocol, 0.0 AS at, 0.0 AS wall",
            "incarnations": "SELECT *, '' AS frozen_digest FROM main.incarnations",
        },
    ),
}


def tables_of(form: int) -> str:
    """Return the statements that make the tables of a format, each ending in `;` and a line's end."""
    return FIRST + "".join(RAISES[number].statements for number in range(2, form + 1))


def lacking_in(form: int) -> dict[str, str]:
    """Return the views, name → SELECT, through which a ledger of this format is read as one of the newest."""
    return {name: select for number, one in RAISES.items() if number > form for name, select in one.lacking.items()}


@cache
def columns_of(form: int) -> dict[str, tuple[str, ...]]:
    """Return table → its columns, as SQLite reads them in the tables of a format."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(tables_of(form))
        tables = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        return {table: tuple(row[1] for row in db.execute(f"PRAGMA table_info({table})")) for (table,) in tables}
