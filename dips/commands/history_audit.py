"""`dips history --audit`: lists the operators' requests in the ledger."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from dips.config import load_run
from dips.protocol.records import OperatorActed
from dips.telemetry.listing import Column, Listing, ListingRow

COLUMNS = tuple(Column(name, left=True) for name in ("when (UTC)", "who", "what", "of what"))


def show_audit(config: Path, last: int, as_json: bool) -> None:
    """Print the newest `last` rows, oldest first; with `as_json` one object per line."""
    from dips.master.genesis import ledger_path
    from dips.master.ledger import Ledger

    with closing(Ledger.open(ledger_path(load_run(config)), readonly=True)) as ledger:
        rows = ledger.read_audit(last)
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
    else:
        Console().print(draw_audit(rows))


def draw_audit(rows: Sequence[OperatorActed]) -> Listing:
    """Draw the requests, each with its outcome in a line below."""
    return Listing("operators", COLUMNS, [_draw_row(row) for row in rows])


def _draw_row(row: OperatorActed) -> ListingRow:
    when = datetime.fromtimestamp(row.wall, UTC).strftime("%Y-%m-%d %H:%M:%S")
    passed = f"before it {row.passed_over} requests that changed nothing, without rows" if row.passed_over else ""
    return ListingRow(
        (when, row.caller, row.action, row.arguments), (row.outcome, passed), "red" if row.refused else ""
    )
