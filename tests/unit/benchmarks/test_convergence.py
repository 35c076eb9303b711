"""benchmarks convergence: its rows run on the machinery of studies, and say what holds."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import convergence, convergence_bad, convergence_rows
from benchmarks.harness import Bench
from tests.unit.study.in_place import compute_in_place
from tests.unit.study.tiny import FACTORY

SHORT = {**convergence_rows.BASE, "inner_steps": 4, "inner.lr": 0.02}
SHORT.pop("task.batch")  # of another factory
QUICK = ("synchronous", "aligned, 50 %", "steps with share in windows of 60 s, 50 %", "data parallel")


@pytest.fixture(name="bench")
def made_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A small task, few rows and few steps; all in this process."""
    compute_in_place(monkeypatch)
    monkeypatch.setattr(convergence, "FACTORY", FACTORY)
    monkeypatch.setattr(convergence, "BASE", SHORT)
    monkeypatch.setattr(convergence, "STEADY", {})
    args = argparse.Namespace(look=False, full=False, steps=96, part=None, workers=1, output=tmp_path)
    return Bench("convergence", True, args, Console(quiet=True))


@pytest.mark.slow
def test_the_quick_rows_say_what_holds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are held against synchronous DiLoCo's."""
    rows = {name: {**convergence_rows.QUICK[name], "seeds": [1, 2]} for name in QUICK}
    monkeypatch.setattr(convergence, "QUICK", rows)
    convergence.measure(bench)
    names = [row.name for row in bench.rows]
    assert set(QUICK) <= set(names)
    held = {row.name.partition(":")[0] for row in bench.rows if row.least is not None}
    assert held == {"aligned, 50 %", "steps with share in windows of 60 s, 50 %"}
    assert (bench.args.output / "quick.csv").exists()


@pytest.mark.slow
def test_bad_data_is_told_by_gates_and_kind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its cost against the run in which the bad clusters were away, and who is blind."""
    chosen = ("dips: one of four, away", "dips: one of four, nan", "none: one of four, sign", "dips: all, lr_x100")
    every = convergence_bad.bad_rows()
    rows = {name: {**every[name], "inner_steps": 4} for name in chosen}
    monkeypatch.setattr(convergence, "bad_rows", lambda: rows)
    bench.args.part, bench.args.steps = ["bad"], 192
    convergence.measure(bench)
    told = {" ".join(note.split()[:4]): note for note in bench.notes}
    assert "100% of" in told["one of four nan"] and "readmitted" in told["one of four nan"]
    assert "blind" in told["one of four sign"] and "%" in told["one of four sign"]
    held = {row.name.partition(" (")[0]: row for row in bench.rows}
    assert held["dips, one of four: bad pushes gated after the first"].holds
    assert "dips, one of four: of the loss with the bad ones away" in held
    assert (bench.args.output / "gates.csv").read_text().count("\n") == 4


def test_bad_ones_are_away_as_long_as_they_would_be_bad() -> None:
    """Of a run without them for a third of its time, as many tokens are accepted meanwhile."""
    fleets = convergence_bad.bad_fleets()
    away = fleets["one of four, away"][0]
    rates = [1 / member["step_s"] for member in fleets["one of four, without"]]
    share = sum(rates) / (sum(rates) + 1 / away["step_s"])
    assert away["returns"] - away["leaves"] == pytest.approx(share / 3)
    assert sum("leaves" in member for member in fleets["two of nine, away"]) == 2
