"""`dips plot`: its numbers are the ledger's, all of them and to the last digit, and its picture shows what it says."""

from __future__ import annotations

import csv
import json
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands.plot import plot_run
from dips.commands.plot_drawing import draw_losses
from dips.config import load_run
from dips.errors import ConfigError
from dips.ids import GENESIS, PushId, VersionId
from dips.master.genesis import ledger_path, make_run
from dips.master.ledger import Ledger
from dips.outer_step import nesterov_step
from dips.protocol.enums import OutcomeKind, RoundResult
from dips.protocol.records import (
    FoldRow,
    OutcomeRow,
    RolledBack,
    RoundEnded,
    RoundReserved,
    ScoreHistory,
    VersionCommitted,
    VersionResult,
)
from dips.view.points import list_points
from tests.run_files import write_run_file

V1, V2, V3 = VersionId(1, 1), VersionId(2, 3), VersionId(2, 4)


def committed(version: VersionId, parent: VersionId, *pushes: tuple[str, int, float | None]) -> VersionCommitted:
    """A version of (cluster, tokens, loss) each, and a gated push of `c`."""
    named = [(PushId(cluster, 1, version.round), tokens, loss) for cluster, tokens, loss in pushes]
    folds = tuple(FoldRow(p, parent, tokens, 4, 1.0, 1.25, 0.5, loss, ()) for p, tokens, loss in named)
    outcomes = [OutcomeRow(p, OutcomeKind.ACCEPTED, "", tokens, 4, 1.25, 0.5, ()) for p, tokens, _ in named]
    gated = OutcomeRow(PushId("c", 1, version.round), OutcomeKind.GATED, "too far", 7, 4, 90.0, 8.0, ())
    step = (nesterov_step(1.0, 0.7, 0.8), 3.0, False, (), (), ScoreHistory((), ()), 12.5)
    return VersionCommitted(version, parent, True, folds, (*outcomes, gated), *step)


@pytest.fixture(name="run_file")
def run_with_a_story(tmp_path: Path) -> Path:
    """Two versions in the lineage, one that was rolled back, a skipped round and an open one."""
    config = load_run(path := write_run_file(tmp_path, ["s"]))
    make_run(config, {"w": np.zeros(3, np.float32)}, force=False, wall=lambda: 0.0)
    ledger = Ledger.open(ledger_path(config))
    skipped = (OutcomeRow(PushId("a", 1, 2), OutcomeKind.SKIPPED, "lost", 10, 4, 1.0, 0.0, ()),)
    ledger.write_records([RoundReserved(1, 0.0)], 1000.0)
    ledger.write_records([committed(V1, GENESIS, ("a", 100, 1 / 3), ("b", 300, None))], 1060.5)
    ledger.write_records([RoundReserved(2, 0.0)], 1070.0)
    ledger.write_records([RoundEnded(2, RoundResult.SKIPPED, "s was lost", skipped, (), 0.0)], 1075.0)
    ledger.write_records([RoundReserved(3, 0.0)], 1080.0)
    ledger.write_records([committed(V2, V1, ("a", 50, 9.0))], 1090.0)
    ledger.write_records([RolledBack(V1, (V2,), "a disk was lost", 0.0)], 1095.0)
    ledger.write_records([RoundReserved(4, 0.0)], 1100.0)
    ledger.write_records([committed(V3, V1, ("a", 100, 0.25), ("b", 300, 0.125))], 1120.0)
    ledger.write_records([VersionResult(V3, True, "", (("validation_loss", 0.2), ("accuracy", 0.75)), 3.0)], 1130.0)
    ledger.write_records([VersionResult(V1, False, "exit code 1", (), 2.0)], 1131.0)
    ledger.write_records([RoundReserved(5, 0.0)], 1140.0)
    ledger.close()
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_csv_is_the_ledger(run_file: Path, tmp_path: Path) -> None:
    """Every settled push is a line with the very numbers of the tables; what was not told is empty, not 0."""
    pushes, results, picture = plot_run(run_file, tmp_path / "plots")
    query = """SELECT o.round, o.kind, o.cluster, o.tokens, o.inner_steps, f.loss, o.norm, o.score, e.wall
               FROM outcomes o JOIN round_ends e USING (round)
               LEFT JOIN folds f ON (f.cluster, f.inc, f.seq) = (o.cluster, o.inc, o.seq) ORDER BY o.place"""
    with sqlite3.connect(ledger_path(load_run(run_file))) as db:
        told = db.execute(query).fetchall()
    db.close()
    names = ("round", "kind", "cluster", "tokens", "inner_steps", "loss", "norm", "score", "wall")
    found = [tuple(row[name] for name in names) for row in rows_of(pushes)]
    assert found == [tuple("" if value is None else str(value) for value in row) for row in told]
    assert [row["loss"] for row in rows_of(pushes)] == [str(1 / 3), "", "", "", "9.0", "", "0.25", "0.125", ""]
    assert [(row["version"], row["name"], row["value"], row["reason"]) for row in rows_of(results)] == [
        (str(V1), "", "", "exit code 1"),
        (str(V3), "validation_loss", "0.2", ""),
        (str(V3), "accuracy", "0.75", ""),
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_numbers_are_printed_as_json(run_file: Path, tmp_path: Path) -> None:
    """Those of the files, which are not written; a version by its name, none of a round that made none."""
    said = json.loads(CliRunner().invoke(cli, ["plot", "-c", str(run_file), "-o", str(tmp_path), "--json"]).stdout)
    accepted = [(push["version"], push["loss"]) for push in said["pushes"] if push["cluster"] == "a"]
    assert accepted == [(str(V1), 1 / 3), (None, None), (str(V2), 9.0), (str(V3), 0.25)]
    assert [(result["version"], result["value"]) for result in said["results"]][1] == (str(V3), 0.2)
    assert not (tmp_path / "loss.csv").exists()


def test_tokens_follow_the_lineage(run_file: Path, tmp_path: Path) -> None:
    """What was rolled back is marked, and its tokens are not those of its successor."""
    rows = rows_of(plot_run(run_file, tmp_path)[0])
    accepted = [(row["version"], row["undone"], row["run_tokens"]) for row in rows if row["kind"] == "accepted"]
    assert accepted == [
        (str(V1), "0", "400"), (str(V1), "0", "400"), (str(V2), "1", "450"), (str(V3), "0", "800"),
        (str(V3), "0", "800"),
    ]  # fmt: skip
    assert [row["seconds"] for row in rows if row["kind"] == "skipped"] == ["75.0"]


def test_the_picture_shows_curves_gates_and_versions(run_file: Path) -> None:
    """Each cluster with losses, the run's mean by tokens, the numbers of versions, gated pushes and versions; twice."""
    ledger = Ledger.open(ledger_path(load_run(run_file)), readonly=True)
    rounds = ledger.read_history(1000)
    ledger.close()
    points, results = list_points(rounds)
    mean = {p.version: p.loss for p in points if p.loss is not None and not p.undone}
    assert mean == pytest.approx({V1: 1 / 3, V3: (100 * 0.25 + 300 * 0.125) / 400})
    figure = draw_losses(points, results)
    labels = [axes.get_legend_handles_labels()[1] for axes in figure.axes]
    losses = ["a", "b", "run, mean by tokens", "validation_loss", "version", "gated push"]
    assert sorted(labels, key=str) == sorted([losses, losses, ["accuracy"], ["accuracy"]], key=str)
    of_a = [next(line for line in axes.lines if line.get_label() == "a") for axes in figure.axes[:2]]
    x_tokens, x_minutes = (list(line.get_xdata()) for line in of_a)
    assert x_tokens == [400 / 1e6, 800 / 1e6] and x_minutes == [60.5 / 60, 2.0]
    drawn = {str(line.get_label()): list(line.get_ydata()) for axes in figure.axes for line in axes.lines}
    assert (drawn["validation_loss"], drawn["accuracy"]) == ([0.2], [0.75])
    marks = {str(line.get_label()): list(line.get_xdata()) for line in figure.axes[0].lines}
    assert marks["version"] == [400 / 1e6, 800 / 1e6], "not the one that was rolled back"
    assert len(marks["gated push"]) == 3
    under = [axes.get_xlabel() for axes in figure.axes]
    assert (
        under == ["", "", "accepted tokens of the run, millions", "minutes"] and figure.axes[0].get_ylabel() == "loss"
    )
    assert all(axes.get_legend() is not None for axes in (figure.axes[0], *figure.axes[2:]))


def test_a_run_without_a_round_is_drawn(run_file: Path, tmp_path: Path) -> None:
    """Nothing happened yet: a header and empty axes."""
    config = load_run(run_file)
    make_run(config, {"w": np.zeros(3, np.float32)}, force=True, wall=lambda: 0.0)
    pushes, picture = plot_run(run_file, tmp_path / "plots")
    assert rows_of(pushes) == [] and picture.exists()


def test_without_matplotlib_the_numbers_are_there(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the extra."""
    monkeypatch.delitem(sys.modules, "dips.commands.plot_drawing")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"di-ps\[plot\]"):
        plot_run(run_file, tmp_path / "plots")
    assert rows_of(tmp_path / "plots" / "loss.csv")
