"""Reads the placement from the ledger: that of `dips init`, and every change by `dips rebalance`."""

from __future__ import annotations

import sqlite3

from dips.dataclass import dataclass
from dips.ids import VersionId
from dips.master.ledger_rows import read_ints
from dips.protocol.placement import Placement


@dataclass(frozen=True, slots=True)
class RebalanceHistory:
    """One rebalance; `wall` is Unix seconds."""

    version: VersionId  # the head at that time
    last_round: int  # the newest reserved round
    wall: float
    before: Placement
    placement: Placement


def read_first_placement(db: sqlite3.Connection) -> Placement:
    """Return the placement of `dips init`."""
    return _placement(db.execute("SELECT slave, layers FROM placement ORDER BY place"))


def read_rebalances(db: sqlite3.Connection) -> list[RebalanceHistory]:
    """Return every rebalance, oldest first."""
    rows = db.execute(
        """SELECT b.place, v.version, b.round, b.last_round, b.wall FROM rebalances b JOIN versions v USING (round)
           ORDER BY b.place"""
    ).fetchall()
    found, before = list[RebalanceHistory](), read_first_placement(db)
    for place, version, number, last_round, wall in rows:
        query = "SELECT slave, layers FROM rebalanced WHERE rebalance = ? ORDER BY place"
        after = _placement(db.execute(query, (place,)))
        found.append(RebalanceHistory(VersionId(version, number), last_round, wall, before, after))
        before = after
    return found


def removed_slaves(rebalances: list[RebalanceHistory]) -> tuple[tuple[str, VersionId], ...]:
    """Return slaves that once held layers and hold none now, each with the version of the rebalance that removed it."""
    removed: dict[str, VersionId] = {}
    for one in rebalances:
        removed.update((name, one.version) for name, _ in one.before)
        for name, _ in one.placement:
            removed.pop(name, None)
    return tuple(sorted(removed.items()))


def read_digests(db: sqlite3.Connection) -> dict[tuple[int, str], str]:
    """Return (round, slave) → digest of the manifest of that slave's snapshot, as the last rebalance wrote it."""
    digests = {(number, slave): digest for number, slave, digest in db.execute("SELECT * FROM digests")}
    rows = db.execute(
        """SELECT b.round, r.slave, r.digest FROM rebalanced r JOIN rebalances b ON b.place = r.rebalance
           WHERE r.digest IS NOT NULL ORDER BY b.place"""
    )
    return digests | {(number, slave): digest for number, slave, digest in rows}


def _placement(rows: sqlite3.Cursor) -> Placement:
    return tuple((slave, read_ints(layers)) for slave, layers in rows)
