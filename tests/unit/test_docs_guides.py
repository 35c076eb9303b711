"""docs/guides: the numbers of a table are those of its formula, and examples of code run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.record import RESULTS, read_runs

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/what-to-expect.md"
BYTES = {"fp32": 8.0, "int8 both ways": 2.032}  # per parameter and round, push and pull together
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}  # bits/s
STANDSTILL = 0.05  # of a cluster's time
DIGITS = 0.006  # three of them are shown


def rows() -> list[list[str]]:
    found = re.findall(
        r"^\| ([\d.]+) \| (.+) \| (.+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE.read_text(), re.MULTILINE
    )
    return [list(row) for row in found]


def test_the_table_of_traffic_is_computed() -> None:
    """Bytes, the time that a link takes for them, and the inner time of which that is five percent."""
    table = rows()
    assert {row[1] for row in table} == set(LINKS) and {row[2] for row in table} == set(BYTES)
    assert len(table) == 4 * len(LINKS) * len(BYTES)
    for size, link, codec, gigabytes, seconds, minutes in table:
        nbytes = float(size) * 1e9 * BYTES[codec]
        link_s = nbytes * 8 / LINKS[link]
        inner_s = link_s * (1 - STANDSTILL) / STANDSTILL
        told = (float(gigabytes), float(seconds), float(minutes))
        assert told == pytest.approx((nbytes / 1e9, link_s, inner_s / 60), rel=DIGITS), (size, link, codec)


def test_the_bytes_are_those_that_were_measured() -> None:
    """The text and the table's formula have the figures of benchmarks/results."""
    found = {row.name: row.value for run in read_runs(RESULTS / "codecs.json") for row in run.rows}
    measured = [found[f"bytes on the connection, {what}"] for what in ("int8 both ways", "int4 push and int8 pull")]
    assert all(f"{value:g}" in GUIDE.read_text() for value in measured) and measured[0] == BYTES["int8 both ways"]
    assert found["bytes on the connection, fp32 both ways"] == pytest.approx(BYTES["fp32"], rel=0.001)
