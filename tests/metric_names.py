"""The metrics of all daemons, as docs/guides/metrics.md lists them.

python -m tests.metric_names --write    # writes the guide's tables anew from the code's
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from dips.client.agent import metrics as agent_metrics
from dips.master import standby
from dips.slave import metrics as slave_metrics
from dips.telemetry import metrics
from dips.telemetry.metrics import Table
from dips.view import prometheus

GUIDE = Path(__file__).parents[1].joinpath("docs/guides/metrics.md")
BEGIN, END = "<!-- {} begins: python -m tests.metric_names --write -->", "<!-- {} ends -->"
ROLES: dict[str, tuple[Table, ...]] = {
    "process": metrics.TABLES,
    "master": prometheus.TABLES,
    "standby": standby.TABLES,
    "slave": slave_metrics.TABLES,
    "agent": agent_metrics.TABLES,
}
UNITS = {"seconds": "s", "bytes": "bytes", "timestamp_seconds": "Unix s", "start_time_seconds": "Unix s"}


def series_of(*roles: str) -> set[str]:
    """Every name that daemons of these roles may be asked for, the parts of histograms too."""
    parts = ("_bucket", "_count", "_sum")
    rows = [row for role in roles for table, _ in ROLES[role] for row in table]
    plain = {row.series for row in rows if not row.histogram}
    return plain | {row.name + part for row in rows if row.histogram for part in parts}


def kinds_of(*roles: str) -> dict[str, str]:
    """What daemons of these roles register, with its type."""
    return {row.series: row.kind for role in roles for table, _ in ROLES[role] for row in table}


def unit_of(name: str) -> str:
    """By its ending, as Prometheus wants it."""
    return next((UNITS[end] for end in sorted(UNITS, key=len, reverse=True) if name.endswith(end)), "")


def table_of(role: str) -> Iterator[str]:
    """The rows of a role, in Markdown."""
    yield "| name | type | unit | labels | meaning |"
    yield "|---|---|---|---|---|"
    for rows, labels in ROLES[role]:
        for row in rows:
            named = ", ".join(f"`{label}`" for label in labels)
            yield f"| `{row.series}` | {row.kind} | {unit_of(row.name)} | {named} | {row.help} |"


def with_tables(text: str) -> str:
    """The guide with the tables that the code has now."""
    for role in ROLES:
        begin, end = BEGIN.format(role), END.format(role)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = "\n".join([before + begin, *table_of(role), end]) + after
    return text


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    GUIDE.write_text(with_tables(GUIDE.read_text()))
