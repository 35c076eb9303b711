"""Reads what the ledger says of how far the run goes: as `dips init` read it, and every `dips set` since."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from dips.protocol.options import Targets


@dataclass(frozen=True, slots=True)
class ExtensionHistory:
    """One `dips set`; `wall` is Unix seconds."""

    last_round: int  # the newest that had been reserved
    wall: float
    before: Targets | None  # None: this is what `dips init` read
    targets: Targets
    resumed: str  # the version at which the run had been finished; empty if it was not


def read_extensions(db: sqlite3.Connection) -> list[ExtensionHistory]:
    """What `dips init` read, then every extension, oldest first."""
    query = "SELECT tokens, versions, wall_s, epochs, resumed, last_round, wall FROM targets ORDER BY place"
    found, before = list[ExtensionHistory](), None
    for tokens, versions, wall_s, epochs, resumed, last_round, wall in db.execute(query):
        targets = Targets(tokens, versions, wall_s, epochs)
        found.append(ExtensionHistory(last_round, wall, before, targets, resumed))
        before = targets
    return found
