"""The report of the papers' figures: complete, of canned results, resumed, ended by Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.__main__ import APART, NAMES
from benchmarks.record import RESULTS, ROOT, BenchRow, BenchRun, spell_runs
from benchmarks.report import FIGURES, PAPERS, CellRun, PaperFigure, ReportCell, ReportCells, draw_figures, write_report

MACHINE = {"cpu": "AMD EPYC", "cores": 2}
TOY = ReportCell("toy", ("--part", "all"))
FIGURE = PaperFigure("Di-PS", "Figure 6", "ZeroMQ against gRPC", TOY, r"^push", "1.74 ×", interval="median of 5")


def run(day: int, *rows: BenchRow) -> BenchRun:
    return BenchRun(f"2026-11-{day:02}", f"c{day}", "benchmark", MACHINE, rows)


def ratio(name: str, times: float) -> BenchRow:
    return BenchRow(name, times, "B/s", "gRPC", times, 1.5, times >= 1.5, of=1.0)


def test_every_figure_and_table_of_the_papers_has_a_line() -> None:
    """By number: a letter names a part of it. None stands twice."""
    for paper, (figures, tables) in PAPERS.items():
        labels = [figure.label for figure in FIGURES if figure.paper == paper]
        assert len(labels) == len(set(labels)), paper
        wanted = {f"Figure {k}" for k in range(1, figures + 1)} | {f"Table {k}" for k in range(1, tables + 1)}
        assert {re.sub(r"[a-z]$", "", label) for label in labels} == wanted, paper


def test_a_figure_is_measured_or_says_why_not() -> None:
    for figure in FIGURES:
        assert (figure.cell is not None and figure.rows and figure.theirs) or figure.why, figure


def test_a_cell_is_a_benchmark_or_is_recorded() -> None:
    """A cell that nothing can run and nothing has recorded would never have a result."""
    for figure in FIGURES:
        if figure.cell is not None and figure.cell.name not in (*NAMES, *APART):
            assert (RESULTS / f"{figure.cell.name}.json").exists(), figure.cell
            assert figure.cell.quick_s is None and figure.cell.full_s is None, figure.cell


def test_what_may_run_fits_the_time() -> None:
    """--quick under 10 minutes, all of it under 2 hours, on two quiet cores."""
    cells = {figure.cell for figure in FIGURES if figure.cell is not None}
    assert sum(cell.quick_s or 0.0 for cell in cells) <= 0.95 * report.QUICK_S


def test_a_result_is_of_the_newest_run_that_has_it() -> None:
    """With command, commit, machine, seed, interval, the paper's number; what was not run today is marked."""
    found = {TOY: CellRun((run(1, ratio("push, old", 1.2), ratio("push, all", 2.0)), run(2, ratio("pull", 1.0))), True)}
    text = write_report([FIGURE], found, quick=True)
    for words in (
        "* paper: 1.74 ×", "`python -m benchmarks toy --part all`", "**recorded** 2026-11-01, commit `c1`",
        "machine: AMD EPYC, 2 cores", "seed: none is drawn; interval: median of 5",
        "| push, all | 2 B/s | gRPC: 1 B/s | 2 | ≥ 1.5 | yes |",
        "| push, old | 1.2 B/s | gRPC: 1 B/s | 1.2 | ≥ 1.5 | **no** |",
    ):  # fmt: skip
        assert words in text, words
    assert "pull" not in text


def test_a_figure_without_a_result_says_so() -> None:
    text = write_report([FIGURE], {TOY: CellRun((), True, "not over in time")}, quick=False)
    assert "**not measured**: not over in time; nothing is recorded" in text


def test_plots_are_of_rows_with_a_ratio(tmp_path: Path) -> None:
    found = {TOY: CellRun((run(1, ratio("push", 2.0)),))}
    assert draw_figures([FIGURE], found, tmp_path) == [tmp_path / "di-ps-figure-6.png"]
    assert (tmp_path / "di-ps-figure-6.png").stat().st_size > 1000
    assert draw_figures([FIGURE], {TOY: CellRun((run(1, BenchRow("push", 2.0, "s")),))}, tmp_path) == []


def test_a_cell_of_this_commit_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it read from a cache where the tree has changes, or had them before the cell was over."""
    measured = []
    made: dict[str, object] = {"machine": MACHINE, "rows": [{"name": "push", "value": 1.0, "unit": "s"}]}

    def measure(cells: ReportCells, cell: ReportCell) -> tuple[dict[str, object], str]:
        measured.append(cell.name)
        return {"date": "2026-11-01", "kind": "benchmark", **made}, ""

    monkeypatch.setattr(ReportCells, "_measure", measure)
    cell = ReportCell("toy", (), 1.0, 1.0)
    for commit, made["commit"], count in (
        ("c1", "c1", 1), ("c1", "c1", 1), ("c2", "c2", 2), ("c2+", "c2+", 3), ("c2+", "c2+", 4),
        ("c3", "c3+", 5), ("c3", "c3", 6), ("c3", "c3", 6),
    ):  # fmt: skip
        monkeypatch.setattr(report, "commit", lambda commit=commit: commit)
        found = ReportCells(tmp_path, True, time.monotonic() + 60.0, print, tmp_path).find(cell)
        assert found.runs[0].rows[0].name == "push" and not found.recorded
        assert len(measured) == count, commit


def test_what_no_time_is_left_for_comes_from_the_record(tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text(spell_runs([run(1, ratio("push", 2.0))]))
    cell = ReportCell("toy", (), 100.0, 100.0)
    found = ReportCells(tmp_path / "cache", True, time.monotonic() + 60.0, print, tmp_path).find(cell)
    assert found.recorded and found.runs[0].commit == "c1"


@pytest.mark.parametrize("most", [3, pytest.param(len(FIGURES), marks=pytest.mark.slow)])
def test_the_command_writes_a_report_of_the_record(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured with --minutes 0. The rows that are recorded can be drawn: those of three figures here."""
    drawn: list[Path] = []

    def draw_some(figures: Iterable[PaperFigure], *rest: Any) -> list[Path]:
        for figure in figures:
            drawn.extend(draw_figures([figure], *rest) if len(drawn) < most else [])
        return drawn

    monkeypatch.setattr(report, "draw_figures", draw_some)
    assert report.main(["--minutes", "0", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]) == 0
    text = (tmp_path / "out" / report.REPORT).read_text()
    assert len(re.findall("^### ", text, re.M)) == len(FIGURES)
    assert 3 <= len(drawn) <= most and set(drawn) == set((tmp_path / "out").glob("*.png"))


CTRL_C = """
import sys
from pathlib import Path
from benchmarks import report
report.FIGURES = (report.PaperFigure("Di-PS", "Figure 6", "", report.ReportCell(sys.argv[1], (), 1.0, 1.0), "x", "1"),)
sys.exit(report.main(["--quick", "--out", sys.argv[2], "--cache", sys.argv[2]]))
"""
SLEEPER = """
import os, sys, time
from pathlib import Path
Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
time.sleep(120)
"""


def test_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    """The benchmark that runs is ended, and the report says that it goes on from there."""
    package = tmp_path / "sleeping"
    package.mkdir()
    (package / "sleeper.py").write_text(SLEEPER)
    # `python -m benchmarks.sleeper` finds it, since a package's path may be longer than its folder.
    start = f"import benchmarks; benchmarks.__path__.append({str(package)!r})"
    (package / "sitecustomize.py").write_text(start)
    pid_file = tmp_path / "pid"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{package}", "PID_FILE": str(pid_file)}
    process = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, "sleeper", str(tmp_path / "out")], cwd=ROOT, env=env, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < until and process.poll() is None, process.stderr
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "interrupted" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert not (tmp_path / "out" / report.REPORT).exists()
