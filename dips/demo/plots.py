"""A chart of the activities in a run over time, drawn from its timelines; `dips plot` draws the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

mpl.use("Agg")  # writes files only, without a screen

Mark = Mapping[str, Any]  # a line of a timeline
Span = tuple[str, float, float]  # activity, begin, end; Unix seconds

SPANS = {
    "inner": ("inner steps", "#cfd8dc"),
    "push": ("push", "#1f77b4"),
    "window": ("window", "#f2b705"),
    "pull": ("pull", "#2ca02c"),
    "down": ("down or starting", "#d62728"),
    "ready": ("slave ready", "#e3ead8"),
    "collecting": ("round takes commits", "#c9a227"),
    "updating": ("update: apply, persist", "#7b3fa0"),
}
CLOSE_UP_S = 24.0
ONE_ROUND_S = 2.0


def draw_timeline(lines: Mapping[str, Sequence[Mark]], directory: Path) -> Path:
    """Write timeline.png into `directory`; `lines` are the timelines of `master` and of every cluster."""
    clusters = [name for name in lines if name != "master"]
    zero = min((marks[0]["at"] for marks in lines.values() if marks), default=0.0)
    path = directory / "timeline.png"
    _draw_timeline(lines, clusters, zero).savefig(path, dpi=130)
    return path


# ---- activities over time -------------------------------------------------------------------------------------------


def _draw_timeline(lines: Mapping[str, Sequence[Mark]], clusters: Sequence[str], zero: float) -> Figure:
    figure = Figure(figsize=(14, 8.5), layout="constrained")
    whole, close, closest = figure.subplots(3, 1)
    rows: list[tuple[str, list[Span]]] = [(name, list(cluster_spans(lines[name]))) for name in clusters]
    rows.append(("master", list(master_spans(lines["master"]))))
    rows += [(name, list(slave_spans(lines["master"], name))) for name in slaves_in(lines["master"])]
    end = max((to for _, spans in rows for _, _, to in spans), default=zero)
    for axes in (whole, close, closest):
        _draw_bars(axes, rows, zero)
    whole.set_xlim(0, max(1.0, end - zero))
    whole.set_title("Who did what when", loc="left")
    _look_at(close, _busy_middle(rows, zero, end) - zero, CLOSE_UP_S)
    _look_at(closest, _busiest_moment(lines["master"], zero + (end - zero) / 2) - zero, ONE_ROUND_S)
    closest.set_xlabel("seconds")
    patches = [Patch(color=color, label=label) for label, color in SPANS.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    return figure


def _busy_middle(rows: Sequence[tuple[str, Sequence[Span]]], zero: float, end: float) -> float:
    """Return the end of the first outage after the start, or else the middle of the run."""
    ends = (to for _, spans in rows for what, at, to in spans if what == "down" and at > zero + CLOSE_UP_S / 2)
    return min(ends, default=zero + (end - zero) / 2)


def _busiest_moment(marks: Sequence[Mark], after: float) -> float:
    """Return when the first version with several contributions was made after a time; else the first version, else that
    time.
    """
    made = [m for m in marks if m["kind"] == "version_committed" and m["at"] > after]
    several = [m for m in made if int(m["contributions"]) > 1]
    return float((several or made or [{"at": after}])[0]["at"])


def _look_at(axes: Axes, middle: float, width_s: float) -> None:
    axes.set_xlim(middle - width_s / 2, middle + width_s / 2)
    axes.set_title(f"{width_s:g} seconds of it", loc="left")


def _draw_bars(axes: Axes, rows: Sequence[tuple[str, Sequence[Span]]], zero: float) -> None:
    for place, (_, spans) in enumerate(rows):
        for what, (_, color) in SPANS.items():
            bars = [(at - zero, to - at) for kind, at, to in spans if kind == what]
            edge = 0 if what in ("inner", "ready") else 0.6  # keeps short bars visible
            axes.broken_barh(bars, (place - 0.38, 0.76), facecolor=color, edgecolor=color, lw=edge)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)


def cluster_spans(marks: Sequence[Mark]) -> Iterator[Span]:
    """Cut an agent's timeline into consecutive spans; time that is nothing else counts as inner steps."""
    state, since = "down", marks[0]["at"] if marks else 0.0
    for mark in marks:
        following = _CLUSTER_MOVES.get(mark["kind"])
        if following is None or following == state:
            continue
        if following == "inner" and state == "down" and mark["kind"] != "pull_end":
            continue  # the outage ends with the first pull
        if mark["at"] > since:
            yield state, since, mark["at"]
        state, since = following, mark["at"]
    if state != "down" and marks and marks[-1]["at"] > since:  # the time after the last trainer is no outage
        yield state, since, marks[-1]["at"]


# The activity that begins at a mark.
_CLUSTER_MOVES = {
    "trainer_start": "down",
    "trainer_gone": "down",
    "trainer_end": "down",
    "push_begin": "push",
    "push_end": "window",
    "window_begin": "window",
    "window_end": "pull",
    "pull_begin": "pull",
    "pull_end": "inner",
    "inner": "inner",
}


def master_spans(marks: Sequence[Mark]) -> Iterator[Span]:
    """Cut the master's timeline into rounds: the time in which commits are taken, and the update."""
    return _cut_spans(marks, _MASTER_MOVES)


_MASTER_MOVES = {
    "round_opened": "collecting",
    "round_applying": "updating",
    "round_persisting": "updating",
    "version_committed": "",
    "round_skipped": "",
    "round_unchanged": "",
}


def slaves_in(marks: Sequence[Mark]) -> list[str]:
    """Return the slaves that the master ever saw ready."""
    return sorted({mark["slave"] for mark in marks if mark["kind"] == "slave_ready"})


def slave_spans(marks: Sequence[Mark], slave: str) -> Iterator[Span]:
    """Yield the spans in which a slave was ready and lost, as seen by the master."""
    own = [mark for mark in marks if mark.get("slave") == slave]
    return _cut_spans(own, _SLAVE_MOVES, marks[-1]["at"])


_SLAVE_MOVES = {"slave_ready": "ready", "slave_lost": "down"}


def _cut_spans(marks: Sequence[Mark], moves: Mapping[str, str], end: float | None = None) -> Iterator[Span]:
    """Yield each span of a state; of the last one only if `end` is given."""
    state, since = "", 0.0
    for mark in marks:
        following = moves.get(mark["kind"])
        if following is None or following == state:
            continue
        if state:
            yield state, since, mark["at"]
        state, since = following, mark["at"]
    if state and end is not None:
        yield state, since, end
