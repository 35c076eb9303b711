"""Reads from the ledger what operators changed: the audit, options, quarantines, the run's targets, the placement."""

from __future__ import annotations

import sqlite3

from dips.dataclass import dataclass
from dips.ids import VersionId
from dips.master.ledger_rows import RowReader, read_ints
from dips.protocol.options import Targets, TunedOption
from dips.protocol.placement import Placement
from dips.protocol.records import OperatorActed

_AUDIT, _TARGETS = RowReader(OperatorActed, "audit"), RowReader(Targets, "targets")


@dataclass(frozen=True, slots=True)
class TuningHistory:
    """One key that `dips set` changed; `wall` is Unix seconds."""

    last_round: int  # the newest reserved round
    wall: float
    change: TunedOption


@dataclass(frozen=True, slots=True)
class ExtensionHistory:
    """One `dips set`; `wall` is Unix seconds."""

    last_round: int  # the newest reserved round
    wall: float
    before: Targets | None  # None: the targets of `dips init`
    targets: Targets
    resumed: str  # the version at which the run had been finished; empty if it was not


@dataclass(frozen=True, slots=True)
class RebalanceHistory:
    """One rebalance; `wall` is Unix seconds."""

    version: VersionId  # the head at that time
    last_round: int  # the newest reserved round
    wall: float
    before: Placement
    placement: Placement


def read_audit(db: sqlite3.Connection, limit: int) -> list[OperatorActed]:
    """Return the newest `limit` rows, oldest first."""
    rows = db.execute(f"SELECT {_AUDIT.columns} FROM audit ORDER BY place DESC LIMIT ?", (limit,)).fetchall()
    return [_AUDIT.read(row) for row in reversed(rows)]


def read_tunings(db: sqlite3.Connection) -> list[TuningHistory]:
    """Return every change of an option, oldest first."""
    rows = db.execute("SELECT last_round, wall, key, value FROM tunings ORDER BY place")
    return [TuningHistory(last_round, wall, _read_option(key, value)) for last_round, wall, key, value in rows]


def read_tuned(db: sqlite3.Connection) -> tuple[TunedOption, ...]:
    """Return the present values of changed options, in the order in which the keys were first changed."""
    found: dict[str, TunedOption] = {}
    for key, value in db.execute("SELECT key, value FROM tunings ORDER BY place"):
        found[key] = _read_option(key, value)
    return tuple(found.values())


def read_quarantined(db: sqlite3.Connection) -> tuple[tuple[str, str], ...]:
    """Return the clusters that an operator has quarantined, with the reasons."""
    found: dict[str, str] = {}
    for cluster, reason in db.execute("SELECT cluster, reason FROM quarantines ORDER BY place"):
        found.pop(cluster, None)
        if reason:
            found[cluster] = reason
    return tuple(found.items())


def _read_option(key: str, value: float | None) -> TunedOption:
    return TunedOption(key, 0.0 if value is None else value, off=value is None)


def read_extensions(db: sqlite3.Connection) -> list[ExtensionHistory]:
    """Return the targets of `dips init`, then every change, oldest first."""
    query = f"SELECT resumed, last_round, wall, {_TARGETS.columns} FROM targets ORDER BY place"
    found, before = list[ExtensionHistory](), None
    for resumed, last_round, wall, *row in db.execute(query):
        targets = _TARGETS.read(row)
        found.append(ExtensionHistory(last_round, wall, before, targets, resumed))
        before = targets
    return found


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
