"""The command `dips plot`: writes the run's losses as a picture and as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dips.commands.options import CONFIG, open_ledger
from dips.config import load_run
from dips.errors import ConfigError
from dips.files import explain_unwritable
from dips.plain import to_plain
from dips.view.points import PushPoint, ResultPoint, RoundPoint, list_points, write_csv

EVERY_ROUND = (1 << 63) - 1  # SQLite's largest integer
PUSHES, RESULTS, PICTURE = "loss.csv", "results.csv", "loss.png"


def plot(
    config: CONFIG,
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to write into.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, and write no files.")] = False,
) -> None:
    """Draw the loss over tokens and over time: of each cluster and of the run, with gates and versions.

    Writes loss.png, loss.csv (a line for each push) and, if `master.on_version` is set, results.csv (a line for each
    number that it brought). Read from the ledger alone; the master may be up or down. The picture needs matplotlib.

    \b
    Example:
      dips plot --config dips.yaml --output plots
    """
    if as_json:
        print(json.dumps(read_numbers(config)))
        return
    for path in plot_run(config, output):
        print(f"wrote {path}")


def read_numbers(config: Path) -> dict[str, Any]:
    """Return the rows of the two tables, by the names of their columns."""
    points, results = _read_points(config)
    pushes = [push for point in points for push in point.pushes]
    return {"pushes": [_spell_point(point) for point in pushes], "results": [_spell_point(r) for r in results]}


def _read_points(config: Path) -> tuple[list[RoundPoint], list[ResultPoint]]:
    with open_ledger(load_run(config)) as ledger:
        return list_points(ledger.read_history(EVERY_ROUND))


def _spell_point(point: Any) -> dict[str, Any]:
    """A number that is not finite becomes null, the name of a version text."""
    plain: dict[str, Any] = to_plain(point)
    return plain | {"version": None if point.version is None else str(point.version)}


def plot_run(config: Path, output: Path) -> list[Path]:
    """Write the files of `dips plot`; return their paths. Raise ConfigError if `output` cannot be written."""
    points, results = _read_points(config)
    with explain_unwritable(f"--output {output}"):
        output.mkdir(parents=True, exist_ok=True)
        written = [output / PUSHES]
        write_csv(output / PUSHES, PushPoint, (push for point in points for push in point.pushes))
        if results:
            write_csv(output / RESULTS, ResultPoint, results)
            written.append(output / RESULTS)
        written.append(_draw_picture(points, results, output / PICTURE))
    return written


def _draw_picture(points: list[RoundPoint], results: list[ResultPoint], path: Path) -> Path:
    try:
        from dips.commands.plot_drawing import draw_losses
    except ImportError as error:
        raise ConfigError(
            f"{path.name} needs matplotlib ({error}): pip install 'di-ps[plot]'; the numbers are in {path.parent}"
        ) from error
    draw_losses(points, results).savefig(path, dpi=130)
    return path
