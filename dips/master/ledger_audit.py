"""Reads operators' rows of the ledger: the audit, changed options, and quarantined clusters."""

from __future__ import annotations

import sqlite3

from dips.dataclass import dataclass
from dips.protocol.options import TunedOption
from dips.protocol.records import OperatorActed


@dataclass(frozen=True, slots=True)
class TuningHistory:
    """One key that `dips set` changed; `wall` is Unix seconds."""

    last_round: int  # the newest reserved round
    wall: float
    change: TunedOption


def read_audit(db: sqlite3.Connection, limit: int) -> list[OperatorActed]:
    """Return the newest `limit` rows, oldest first."""
    query = """SELECT caller, action, arguments, outcome, refused, asked, passed_over FROM audit
               ORDER BY place DESC LIMIT ?"""
    rows = db.execute(query, (limit,)).fetchall()
    return [
        OperatorActed(caller, action, arguments, outcome, bool(refused), asked, passed_over)
        for caller, action, arguments, outcome, refused, asked, passed_over in reversed(rows)
    ]


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
