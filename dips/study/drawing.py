"""A chart of a study's losses: each row's mean and seeds, with the row that the others are compared with."""

from __future__ import annotations

from statistics import mean

import matplotlib as mpl
from matplotlib.figure import Figure

from dips.study.report import losses_of
from dips.study.runner import StudyResult

mpl.use("Agg")  # writes files only, without a screen

ROW_INCHES, LEAST_INCHES, WIDTH_INCHES = 0.32, 2.5, 9.0
SEED, MEAN, COMPARED = "#88aadd", "#1f3f77", "#d62728"


def draw_study(result: StudyResult) -> Figure:
    """Draw a line for each row, the best at the top."""
    found = {row.name: losses_of(result, row.name) for row in result.study.rows}
    rows = sorted((row for row in found if found[row]), key=lambda row: -mean(found[row].values()))
    figure = Figure(figsize=(WIDTH_INCHES, max(LEAST_INCHES, 1.0 + ROW_INCHES * len(rows))), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(rows):
        losses = list(found[row].values())
        axes.plot(losses, [at] * len(losses), "o", color=SEED, ms=5, label="seeds" if at == 0 else None)
        axes.plot([mean(losses)], [at], "D", color=MEAN, ms=6, label="mean" if at == 0 else None)
    compared = found.get(result.study.compare)
    if compared:
        axes.axvline(mean(compared.values()), color=COMPARED, lw=1.0, ls="--", label=result.study.compare)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    units = [n["unit"] for runs in result.runs.values() for n in runs.values()]
    axes.set_xlabel(f"validation loss, {units[0]}" if units else "validation loss")
    axes.grid(alpha=0.25)
    if rows:
        axes.legend(fontsize=8)
    return figure
