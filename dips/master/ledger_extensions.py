"""Reads the run's targets from the ledger: those of `dips init`, and every change by `dips set`."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from dips.protocol.options import Targets


@dataclass(frozen=True, slots=True)
class ExtensionHistory:
    """One `dips set`; `wall` is Unix seconds."""

    last_round: int  # the newest reserved round
    wall: float
    before: Targets | None  # None: the targets of `dips init`
    targets: Targets
    resumed: str  # the version at which the run had been finished; empty if it was not


def read_extensions(db: sqlite3.Connection) -> list[ExtensionHistory]:
    """Return the targets of `dips init`, then every change, oldest first."""
    query = "SELECT tokens, versions, wall_s, epochs, resumed, last_round, wall FROM targets ORDER BY place"
    found, before = list[ExtensionHistory](), None
    for tokens, versions, wall_s, epochs, resumed, last_round, wall in db.execute(query):
        targets = Targets(tokens, versions, wall_s, epochs)
        found.append(ExtensionHistory(last_round, wall, before, targets, resumed))
        before = targets
    return found
