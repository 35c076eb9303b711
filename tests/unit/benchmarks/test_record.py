"""The record of what was measured: what is appended, which rows the table has, and that it is up to date."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import RESULTS, TABLE, BenchRow, BenchRun, append_runs, make_table, read_runs, spell_runs

MACHINE = {"cpu": "AMD EPYC", "cores": 2}
FILES = sorted(RESULTS.glob("*.json"))


def run(day: int, *rows: BenchRow, quick: bool = False, machine: dict[str, Any] = MACHINE) -> BenchRun:
    return BenchRun(f"2026-11-{day:02}", f"c{day}", "benchmark", machine, rows, quick=quick)


def rate(value: float, name: str = "rate", against: str = "memcpy") -> BenchRow:
    return BenchRow(name, value, "B/s", against, value / 10e9, 0.8, value >= 8e9, of=10e9)


def table_of(folder: Path, *runs: BenchRun) -> list[list[str]]:
    """The cells of the table's rows."""
    (folder / "toy.json").write_text(spell_runs(runs))
    lines = [line for line in make_table(folder).splitlines() if line.startswith("| [toy]")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_is_up_to_date() -> None:
    """benchmarks/README.md is what `python -m benchmarks --table` writes."""
    assert TABLE.read_text() == make_table(), "run `python -m benchmarks --table`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_results_is_as_it_is_written(path: Path) -> None:
    """Every field is known; the text is what appending would write, so a change shows only what has changed."""
    runs = read_runs(path)
    assert runs and path.read_text() == spell_runs(runs)
    assert [run.date for run in runs] == sorted(run.date for run in runs)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_recorded_is_sound(path: Path) -> None:
    """A date, cores, rows; a row holds if its ratio says so. No path and no name of a host is published."""
    for found in read_runs(path):
        date.fromisoformat(found.date)
        assert found.kind in ("benchmark", "by-hand") and found.machine["cores"] >= 1 and found.rows
        for row in found.rows:
            assert row.least is None or row.ratio is None or row.holds is (row.ratio >= row.least), row
            assert row.holds or row.promised, row
    assert not re.search(r"/(home|root|tmp|work|usr)\b|localhost|hostname", path.read_text())


def test_what_is_appended_is_kept_with_what_was_there(tmp_path: Path) -> None:
    """A benchmark's report becomes the last run of its file, dated today; those before it stay, failures included."""
    (tmp_path / "toy.json").write_text(spell_runs([run(1, rate(1e9))]))
    report = {"machine": MACHINE, "commit": "abc", "quick": False, "took_s": 2.0, "notes": ["why"],
              "rows": [{"name": "rate", "value": 9e9, "unit": "B/s", "ratio": 0.9, "least": 0.8}]}  # fmt: skip
    append_runs([("toy", report), ("other", report)], tmp_path)
    before, now = read_runs(tmp_path / "toy.json")
    assert before == run(1, rate(1e9)) and not before.rows[0].holds
    assert (now.date, now.commit, now.kind, now.notes) == (date.today().isoformat(), "abc", "benchmark", ("why",))
    assert read_runs(tmp_path / "other.json")[0].rows == (BenchRow("rate", 9e9, "B/s", "", 0.9, 0.8),)


def test_the_table_has_the_newest_row_of_a_claim_and_machine(tmp_path: Path) -> None:
    """Claims differ by name or by what they are compared with, machines by processor, cores or accelerator."""
    gpu = {**MACHINE, "accelerator": "H100"}
    rows = table_of(
        tmp_path, run(1, rate(9e9), rate(9e9, "gone")), run(1, rate(7e9), machine=gpu),
        run(2, rate(1e9), rate(8e9, against="gRPC")),
    )  # fmt: skip
    assert [(row[1], row[2], row[3], row[6], row[7]) for row in rows] == [
        ("rate", "1 GB/s", "memcpy: 10 GB/s", "**no**", "AMD EPYC, 2 cores"),
        ("gone", "9 GB/s", "memcpy: 10 GB/s", "yes", "AMD EPYC, 2 cores"),
        ("rate", "7 GB/s", "memcpy: 10 GB/s", "**no**", "AMD EPYC, 2 cores, H100"),
        ("rate", "8 GB/s", "gRPC: 10 GB/s", "yes", "AMD EPYC, 2 cores"),
    ]


def test_a_quick_run_counts_where_there_is_no_other(tmp_path: Path) -> None:
    """A look is no measurement: it never takes the place of one, however new it is."""
    assert table_of(tmp_path, run(1, rate(9e9)), run(2, rate(1e9), quick=True))[0][2] == "9 GB/s"
    assert table_of(tmp_path, run(2, rate(1e9), quick=True))[0][-1] == "2026-11-02, `c2`, quick"


def test_rows_without_a_bound_are_of_the_table_if_a_person_wrote_them(tmp_path: Path) -> None:
    """A benchmark's parts stay in its file."""
    part = BenchRow("part", 1.0, "s")
    assert not table_of(tmp_path, run(1, part))
    by_hand = BenchRun("2026-11-01", "", "by-hand", MACHINE, (part,))
    assert [row[-1] for row in table_of(tmp_path, by_hand)] == ["2026-11-01, by hand"]


@pytest.mark.parametrize(
    ("row", "times", "promised"),
    [
        (BenchRow("t", 2.0, "s", "gloo", 0.5, 0.5, less=True, of=1.0), 2.0, "≤ 2"),
        (BenchRow("t", 2.0, "s", "gloo", 0.4, 0.5, less=True), 2.5, "≤ 2"),
        (BenchRow("r", 2.0, "B/s", "gloo", 0.5, 0.8, of=4.0), 0.5, "≥ 0.8"),
        (BenchRow("n", 0.0, "of 10", bound="0"), None, "0"),
    ],
)
def test_a_bound_is_shown_of_the_ratio_as_it_was_measured(row: BenchRow, times: float, promised: str) -> None:
    """A ratio that was turned over, so that more is better, is turned back for a reader, and its bound with it."""
    assert (row.times, row.promised) == (times, promised)


def test_a_field_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """A result that was written by hand is read as strictly as any."""
    made = json.loads(spell_runs([run(1, rate(9e9))]))
    made[0]["rows"][0]["promise"] = 1
    (tmp_path / "toy.json").write_text(json.dumps(made))
    with pytest.raises(TypeError, match="promise"):
        read_runs(tmp_path / "toy.json")
