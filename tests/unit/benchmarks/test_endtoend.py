"""The cells of endtoend: which are measured again, and what differs between them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import endtoend
from benchmarks.endtoend import SCALING_SPEEDS, Cell, Cells, CellSeen, measure_scaling
from benchmarks.harness import Bench
from benchmarks.timed_rank import Stretch

SEEN = CellSeen({"c0": [Stretch(steps=10, planned_s=1.0, calls=[0.1])]})


def made_bench(**args: object) -> Bench:
    return Bench("endtoend", False, argparse.Namespace(**args), Console(quiet=True))


def test_a_cell_of_a_tree_with_changes_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one state of the code had measured would have been a row of another: both are called by one commit."""
    measured = []
    monkeypatch.setattr(endtoend, "live", lambda cell: measured.append(cell) or SEEN)
    for commit, count in (("c1", 1), ("c1", 1), ("c2", 2), ("c2+", 3), ("c2+", 4)):
        monkeypatch.setattr(endtoend, "commit", lambda commit=commit: commit)
        assert Cells(made_bench(), tmp_path).measure("a cell", Cell("full", (1.0,))) == SEEN
        assert len(measured) == count, commit


def test_a_cell_during_which_the_tree_has_changed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have been read as one of the commit at which the run began, and is of another state of the code."""
    monkeypatch.setattr(endtoend, "live", lambda _: SEEN)
    monkeypatch.setattr(endtoend, "commit", lambda: "c1")
    cells = Cells(made_bench(), tmp_path)
    for now, kept in (("c1+", 0), ("c2", 0), ("c1", 1)):
        monkeypatch.setattr(endtoend, "commit", lambda now=now: now)
        assert cells.measure("a cell", Cell("full", (1.0,))) == SEEN
        assert len(list(tmp_path.iterdir())) == kept, now


def test_a_cluster_takes_the_same_steps_beside_any_number_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest took five times as many in a second among seven as alone, and weak scaling showed what each costs."""
    cells: list[Cell] = []
    monkeypatch.setattr(Cells, "measure", lambda _, what, cell: cells.append(cell) or SEEN)
    measure_scaling(made_bench(), Cells(made_bench(), None))
    assert {len(cell.speeds) for cell in cells} == set(range(1, len(SCALING_SPEEDS) + 1))
    for name, step_s in cells[-1].steps_s.items():
        assert all(c.steps_s[name] == pytest.approx(step_s) for c in cells if name in c.clusters), name
