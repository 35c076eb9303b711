"""Draws the run's losses: over the tokens that it has accepted, and over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dips.view.points import PushPoint, ResultPoint, RoundPoint

mpl.use("Agg")  # writes files only, without a screen

MOST_NAMED = 12  # clusters in the legend
MOST_PANELS = 4  # panels for numbers that are no losses
RESULTS = ("#117733", "#aa3377", "#999933", "#882255")  # distinct from the clusters' colors
RUN, GATED, VERSION = "black", "#d62728", "#7b3fa0"
FAINT = 0.25  # opacity of pushes that were rolled back
Point = PushPoint | ResultPoint | RoundPoint
Place = Callable[[Point], float]


def draw_losses(points: Sequence[RoundPoint], results: Sequence[ResultPoint]) -> Figure:
    """Two columns, over tokens and over time; a row for losses and one for each other number of `on_version`."""
    others = sorted({r.name for r in results if r.name and not _is_loss(r.name)})[:MOST_PANELS]
    figure = Figure(figsize=(13, 5 + 2.5 * len(others)), layout="constrained")
    grid = figure.subplots(
        1 + len(others), 2, sharex="col", sharey="row", squeeze=False, height_ratios=[2.0] + [1.0] * len(others)
    )
    columns: tuple[tuple[str, Place], ...] = (
        ("accepted tokens of the run, millions", lambda p: (p.run_tokens or 0) / 1e6),
        ("minutes", lambda p: p.seconds / 60),
    )
    for column, (label, place) in enumerate(columns):
        _draw_column(grid[0][column], points, results, place)
        for row, name in enumerate(others, 1):
            _draw_result(grid[row][column], [r for r in results if r.name == name], place, name)
            grid[row][column].legend(fontsize=8)
        grid[-1][column].set_xlabel(label)
    grid[0][0].set_ylabel("loss")
    if grid[0][0].get_legend_handles_labels()[0]:
        grid[0][0].legend(fontsize=8)
    return figure


def _is_loss(name: str) -> bool:
    return "loss" in name


def _draw_column(axes: Axes, points: Sequence[RoundPoint], results: Sequence[ResultPoint], place: Place) -> None:
    pushes = [push for point in points for push in point.pushes]
    for number, cluster in enumerate(sorted({p.cluster for p in pushes})):
        _draw_cluster(axes, [p for p in pushes if p.cluster == cluster], place, f"C{number % 10}", number < MOST_NAMED)
    run = [(place(p), p.loss) for p in points if p.loss is not None and not p.undone]
    axes.plot([x for x, _ in run], [y for _, y in run], color=RUN, lw=1.4, label="run, mean by tokens")
    for number, name in enumerate(sorted({r.name for r in results if _is_loss(r.name)})):
        _draw_result(axes, [r for r in results if r.name == name], place, name, RESULTS[number % len(RESULTS)])
    _mark_bottom(
        axes, [place(p) for p in points if p.version is not None and not p.undone], "|", VERSION, "version", 0.02
    )
    _mark_bottom(axes, [place(p) for p in pushes if p.kind == "gated"], "x", GATED, "gated push", 0.05)
    axes.grid(alpha=0.25)


def _draw_cluster(axes: Axes, points: Sequence[PushPoint], place: Place, color: str, named: bool) -> None:
    """A line through the losses of its accepted pushes; what was rolled back is faint and apart."""
    for undone in (False, True):
        told = [(place(p), p.loss) for p in points if p.loss is not None and p.undone is undone]
        if told:
            label = points[0].cluster if named and not undone else None
            style = {"alpha": FAINT, "ls": "none"} if undone else {"lw": 0.9}
            axes.plot([x for x, _ in told], [y for _, y in told], marker=".", ms=4, color=color, label=label, **style)


def _draw_result(axes: Axes, points: Sequence[ResultPoint], place: Place, name: str, color: str = RESULTS[0]) -> None:
    told = [(place(r), r.value) for r in points if r.value is not None and not r.undone]
    axes.plot([x for x, _ in told], [y for _, y in told], "D--", ms=5, lw=1.2, color=color, label=name)
    axes.grid(alpha=0.25)


def _mark_bottom(axes: Axes, xs: Sequence[float], marker: str, color: str, label: str, height: float) -> None:
    if xs:
        at_bottom = axes.get_xaxis_transform()
        axes.plot(xs, [height] * len(xs), marker, color=color, ms=6, transform=at_bottom, label=label)
