"""Reads from the ledger what happened: each round with its folds and outcomes, and what operators changed."""

from __future__ import annotations

import json
import sqlite3
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from dips.dataclass import dataclass
from dips.ids import VersionId
from dips.master.ledger_rows import (
    FOLDS,
    OUTCOMES,
    STEP_COLUMNS,
    THE_STEP,
    RowReader,
    read_factors,
    read_ints,
    read_real,
    read_step,
)
from dips.outer_step import NO_STEP, Factors
from dips.protocol.options import Targets, TunedOption
from dips.protocol.placement import Placement
from dips.protocol.records import FoldRow, OperatorActed, OutcomeRow
from dips.view.points import ResultHistory, RoundHistory

STEP_NUMBERS = STEP_COLUMNS.count(",") + 1


def read_history(db: sqlite3.Connection, limit: int) -> list[RoundHistory]:
    """Return the newest `limit` rounds, oldest first."""
    return _read_rounds(db, f"{_ROUNDS} ORDER BY r.round DESC LIMIT ?", (limit,))


def read_newest(db: sqlite3.Connection) -> list[RoundHistory]:
    """Return the rounds of the newest durable version and of the newest one, of those that are not undone."""
    stands = """SELECT v.round FROM versions v LEFT JOIN durable d USING (round) LEFT JOIN undone u USING (round)
                WHERE u.round IS NULL"""
    rounds = list[RoundHistory]()
    for chosen in (f"{stands} AND (v.durable OR d.round IS NOT NULL)", stands):
        rounds += _read_rounds(db, f"{_ROUNDS} WHERE r.round = ({chosen} ORDER BY v.round DESC LIMIT 1)", ())
    return rounds


def find_round_before(db: sqlite3.Connection, count: int) -> int:
    """Return the number of the round before the newest `count` ones; 0 if there is none."""
    row = db.execute("SELECT round FROM rounds ORDER BY round DESC LIMIT 1 OFFSET ?", (count,)).fetchone()
    return int(row[0]) if row else 0


def read_rounds_after(db: sqlite3.Connection, number: int, limit: int) -> list[RoundHistory]:
    """Return the first `limit` rounds above a number, oldest first."""
    return _read_rounds(db, f"{_ROUNDS} WHERE r.round > ? ORDER BY r.round LIMIT ?", (number, limit))


_ROUNDS = f"""SELECT r.round, e.kind, e.reason, r.wall, e.wall, v.version, v.parent_version, v.parent_round, v.tokens,
                  {STEP_COLUMNS}, v.delta_norm, v.clipped, v.durable OR d.round IS NOT NULL, b.reason, c.source,
                  c.layers, p.ok, p.reason, p.numbers, p.seconds, p.wall
           FROM rounds r LEFT JOIN round_ends e USING (round) LEFT JOIN versions v USING (round)
           LEFT JOIN durable d USING (round) LEFT JOIN recoveries c USING (round)
           LEFT JOIN version_results p USING (round)
           LEFT JOIN undone u USING (round) LEFT JOIN rollbacks b ON b.place = u.rollback"""


def _read_rounds(db: sqlite3.Connection, query: str, values: tuple[int, ...]) -> list[RoundHistory]:
    rows = sorted(db.execute(query, values).fetchall(), key=itemgetter(0))
    if not rows:
        return []
    factors = read_factors(db, rows[0][0], rows[-1][0])
    folds, outcomes = _read_pushes(db, rows[0][0], rows[-1][0], factors)
    return [_read_round(row, folds[row[0]], outcomes[row[0]], factors.get((row[0], THE_STEP), ())) for row in rows]


def _read_pushes(
    db: sqlite3.Connection, first: int, last: int, factors: Mapping[tuple[int, int], Factors]
) -> tuple[dict[int, list[FoldRow]], dict[int, list[OutcomeRow]]]:
    """Return folds and outcomes by round, with one query for each table instead of one for each round."""
    folds, outcomes = defaultdict[int, list[FoldRow]](list), defaultdict[int, list[OutcomeRow]](list)
    query = f"SELECT f.round, f.place, {FOLDS.columns} FROM folds f WHERE f.round BETWEEN ? AND ? ORDER BY 1, 2"
    for number, place, *fold in db.execute(query, (first, last)):
        folds[number].append(FOLDS.read(fold, factors.get((number, place), ())))
    query = f"SELECT o.round, {OUTCOMES.columns} FROM outcomes o WHERE o.place BETWEEN ? AND ? ORDER BY o.place"
    for number, *outcome in db.execute(query, (_count_before(db, first) + 1, _count_before(db, last + 1))):
        outcomes[number].append(OUTCOMES.read(outcome))
    return folds, outcomes


def _count_before(db: sqlite3.Connection, number: int) -> int:
    """Return the place of the last Outcome of rounds below `number`, 0 if there is none.

    Outcomes have no index by round, but their places ascend with it: a walk over all of them for some rounds takes
    seconds in a long ledger.
    """
    (count,) = db.execute("SELECT coalesce(max(place), 0) FROM outcomes").fetchone()
    query = "SELECT round FROM outcomes WHERE place >= ? ORDER BY place LIMIT 1"
    return bisect_left(range(1, count + 1), number, key=lambda place: db.execute(query, (place,)).fetchone()[0])


def read_results_after(db: sqlite3.Connection, number: int, limit: int) -> list[RoundHistory]:
    """Return the first `limit` rounds above a number whose version's process has ended, oldest first, without their
    pushes: all of the rounds between them would be read.
    """
    ended = "SELECT round FROM version_results WHERE round > ? ORDER BY round LIMIT ?"
    query = f"{_ROUNDS} WHERE r.round IN ({ended}) ORDER BY r.round"
    return [_read_round(row, [], [], ()) for row in db.execute(query, (number, limit))]


def find_unprocessed(db: sqlite3.Connection, every: int) -> VersionId | None:
    """Return the oldest `every`-th version after the last with a result that is durable, neither undone nor retired."""
    row = db.execute(
        """SELECT v.version, v.round FROM versions v LEFT JOIN durable d USING (round)
           LEFT JOIN undone u USING (round) LEFT JOIN retired t USING (round)
           WHERE v.round > (SELECT coalesce(max(round), 0) FROM version_results) AND v.version % ? = 0
             AND (v.durable OR d.round IS NOT NULL) AND u.round IS NULL AND t.round IS NULL
           ORDER BY v.round LIMIT 1""",
        (every,),
    ).fetchone()
    return VersionId(*row) if row else None


def _read_round(
    row: tuple[Any, ...], folds: list[FoldRow], outcomes: list[OutcomeRow], scales: Factors
) -> RoundHistory:
    number, kind, reason, opened, ended, version, parent_version, parent_round, tokens, *rest = row
    step, (delta, clipped, durable, undone, source, lost, *result) = rest[:STEP_NUMBERS], rest[STEP_NUMBERS:]
    made = version is not None
    return RoundHistory(
        number, kind or "unfinished", reason or "", opened, ended,
        VersionId(version, number) if made else None,
        VersionId(parent_version, parent_round) if made else None,
        tokens or 0, read_step(step, scales) if made else NO_STEP, read_real(delta) if made else 0.0, bool(clipped),
        tuple(folds), tuple(outcomes), bool(durable), undone,
        _describe_recovery(source, lost) if source is not None else None,
        _read_result(*result) if result[0] is not None else None,
    )  # fmt: skip


def _read_result(ok: int, reason: str, numbers: str, seconds: float, wall: float) -> ResultHistory:
    return ResultHistory(bool(ok), reason, json.loads(numbers), seconds, wall)


def _describe_recovery(source: str, lost: str) -> str:
    """Describe a version that an operator recovered, for `dips history`."""
    names = ", ".join(json.loads(lost))
    return f"from {source}: " + (f"layers {names} lost their momentum" if names else "no momentum was lost")


# ---- ledger operators ------------------------------------------------------------------------------------------------

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
