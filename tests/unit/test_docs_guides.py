"""docs/guides: the numbers of a table are those of its formula."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE, LOG = ROOT / "docs/guides/what-to-expect.md", ROOT / "benchmarks/LOG.md"
BYTES = {"fp32": 8.0, "int8 both ways": 2.032}  # per parameter and round, push and pull together: benchmarks/LOG.md
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
    """The text names them, and the log has them."""
    log = LOG.read_text()
    assert "int8 2.032, int4 push and int8 pull" in log and "1.548" in log
    assert all(number in GUIDE.read_text() for number in ("2.032", "1.548"))
