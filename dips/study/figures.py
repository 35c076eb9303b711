"""Figures of a simulated run, as papers/di-ps.txt draws its production run: Figures 8, 14b, 15, 16 and 17.

timeline.png    when each cluster pushed, waited, pulled and was down
devices.png     devices that were there and not down, hour by hour (Figure 8)
throughput.png  inner steps in each hour, as a share of what the cluster's devices can take (Figure 14b)
slaves.png      what each slave did in a day (Figure 15)
link.png        the rates of one slave's link over six hours (Figure 16)
downtime.png    hours of devices that were lost to failures, and to the pull after each (Figure 17)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dips.errors import ConfigError
from dips.files import explain_unwritable
from dips.study.sized_run import HOUR_S, ClusterPhase, ClusterTimeline, RunTimeline, SizedReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_SHOWN = 32  # clusters or slaves, a row each
WINDOW_H = 6.0  # of link.png
DAY_MINUTES = 1440.0
LEAST_MINUTES = 0.1  # of a day, of an order that is shown by its name
COLORS = {
    ClusterPhase.PUSH: "#1f77b4", ClusterPhase.WAIT: "#bbbbbb", ClusterPhase.PULL: "#2ca02c",
    ClusterPhase.DOWN: "#d62728", ClusterPhase.RETURN: "#9467bd",
}  # fmt: skip


def find_matplotlib() -> type[Figure]:
    """Return its Figure. Raises ConfigError if it is not installed: better before a simulation than after it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--plots needs matplotlib ({error}): pip install 'di-ps[plot]'") from error
    return Figure


def draw_figures(report: SizedReport, directory: Path) -> list[Path]:
    """Draw all that the run has something for into a directory, which is made; return the files.

    Raises ConfigError without matplotlib, and if they cannot be written.
    """
    make_figure, drawn = find_matplotlib(), []
    with explain_unwritable(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, draw in FIGURES.items():
            figure = make_figure(figsize=(12, 4.5), layout="constrained")
            if draw(report, figure.subplots()):
                figure.savefig(directory / name, dpi=130)
                drawn.append(directory / name)
    return drawn


# ---- hours ----------------------------------------------------------------------------------------------------------


def list_available(timeline: RunTimeline, cluster: ClusterTimeline) -> list[float]:
    """Return the cluster's devices in each hour of the run that were there and not down, as a mean over the hour."""
    present = [_overlap(hour, cluster.begin_s, cluster.end_s) for hour in range(timeline.hours)]
    for span in timeline.spans:
        if span.cluster == cluster.cluster and span.phase is ClusterPhase.DOWN:
            for hour in range(int(span.begin_s // HOUR_S), min(timeline.hours, int(span.end_s // HOUR_S) + 1)):
                present[hour] -= _overlap(hour, span.begin_s, span.end_s)
    return [cluster.devices * share for share in present]


def list_speeds(timeline: RunTimeline, cluster: ClusterTimeline) -> list[float]:
    """Return inner steps in each hour as a share of what fits into it; nan where the cluster takes no part."""
    shares = []
    for hour in range(timeline.hours):
        there_s = HOUR_S * _overlap(hour, cluster.begin_s, cluster.end_s)
        took_s = cluster.steps.get(hour, 0) * cluster.step_s
        shares.append(took_s / there_s if there_s > cluster.step_s else nan)
    return shares


def _overlap(hour: int, begin_s: float, end_s: float) -> float:
    """The share of an hour that a time takes."""
    return max(0.0, min(end_s, (hour + 1) * HOUR_S) - max(begin_s, hour * HOUR_S)) / HOUR_S


def _by_kind(timeline: RunTimeline) -> Iterator[tuple[str, list[ClusterTimeline]]]:
    kinds: dict[str, list[ClusterTimeline]] = {}
    for cluster in timeline.clusters:
        kinds.setdefault(cluster.kind, []).append(cluster)
    for kind, members in kinds.items():
        yield kind if len(members) == 1 else f"{kind} ×{len(members)}", members


# ---- figures --------------------------------------------------------------------------------------------------------


def _draw_timeline(report: SizedReport, axes: Axes) -> bool:
    timeline = report.timeline
    names: Sequence[str] = [cluster.cluster for cluster in timeline.clusters][:MOST_SHOWN]
    _size_for_rows(axes, len(names))
    for row, name in enumerate(names):
        for phase, color in COLORS.items():
            spans = [s for s in timeline.spans if s.cluster == name and s.phase is phase]
            axes.broken_barh(
                [(s.begin_s / HOUR_S, (s.end_s - s.begin_s) / HOUR_S) for s in spans], (row - 0.4, 0.8),
                facecolors=color,
            )  # fmt: skip
    axes.plot([at / HOUR_S for at in timeline.versions_s], [-1] * report.versions, "|", color="black")
    axes.set_yticks([-1, *range(len(names))], ["versions", *names])
    axes.invert_yaxis()
    axes.set_xlabel("hours")
    for phase, color in COLORS.items():
        axes.plot([], [], color=color, lw=6, label=str(phase))
    axes.legend(fontsize=8, ncol=len(COLORS), loc="upper right")
    return True


def _draw_devices(report: SizedReport, axes: Axes) -> bool:
    labels, heights = [], []
    for label, members in _by_kind(report.timeline):
        labels.append(label)
        each = [list_available(report.timeline, cluster) for cluster in members]
        heights.append([sum(hour) for hour in zip(*each, strict=True)])
    axes.stackplot(range(report.timeline.hours), heights, labels=labels, step="post", alpha=0.8)
    _label(axes, "hours", "devices at work")
    return True


def _draw_throughput(report: SizedReport, axes: Axes) -> bool:
    for label, members in _by_kind(report.timeline):
        each = [list_speeds(report.timeline, cluster) for cluster in members]
        axes.plot([_mean(hour) for hour in zip(*each, strict=True)], drawstyle="steps-post", lw=1, label=label)
    axes.set_ylim(bottom=0)
    _label(axes, "hours", "share of the devices' full rate")
    return True


def _draw_slaves(report: SizedReport, axes: Axes) -> bool:
    slaves = report.slaves[:MOST_SHOWN]
    _size_for_rows(axes, len(slaves))
    works = sorted({o for slave in slaves for o, share in slave.orders.items() if DAY_MINUTES * share >= LEAST_MINUTES})
    rows: dict[str, list[float]] = {order: [slave.orders.get(order, 0.0) for slave in slaves] for order in works}
    rows["other orders"] = [slave.worked - sum(slave.orders.get(o, 0.0) for o in works) for slave in slaves]
    rows |= {"receives": [slave.received for slave in slaves], "sends": [slave.sent for slave in slaves]}
    left = [0.0] * len(slaves)
    for label, shares in rows.items():
        minutes = [DAY_MINUTES * share for share in shares]
        axes.barh(range(len(slaves)), minutes, left=left, label=label)
        left = [at + width for at, width in zip(left, minutes, strict=True)]
    axes.set_yticks(range(len(slaves)), [slave.slave for slave in slaves])
    axes.invert_yaxis()
    _label(axes, f"minutes of a day; idle for at least {min(slave.idle for slave in slaves):.1%}", "")
    return True


def _draw_link(report: SizedReport, axes: Axes) -> bool:
    middle = report.hours / 2
    first, last = max(0.0, middle - WINDOW_H / 2), min(report.hours, middle + WINDOW_H / 2)
    for label, rates in (("receives", report.timeline.received_gbit), ("sends", report.timeline.sent_gbit)):
        shown = [(at / HOUR_S, gbit) for at, gbit in rates if first <= at / HOUR_S <= last]
        axes.bar([at for at, _ in shown], [gbit for _, gbit in shown], report.timeline.sample_s / HOUR_S, label=label)
    axes.set_xlim(first, last)
    _label(axes, "hours", f"Gbit/s at {report.slaves[0].slave}")
    return True


def _draw_downtime(report: SizedReport, axes: Axes) -> bool:
    if not report.failures:
        return False
    labels, own, returns = [], [], []
    for label, members in _by_kind(report.timeline):
        lost_h = dict.fromkeys((ClusterPhase.DOWN, ClusterPhase.RETURN), 0.0)
        devices = {cluster.cluster: cluster.devices for cluster in members}
        for span in report.timeline.spans:
            if span.cluster in devices and span.phase in lost_h:
                lost_h[span.phase] += devices[span.cluster] * (span.end_s - span.begin_s) / HOUR_S
        labels.append(label)
        own.append(lost_h[ClusterPhase.DOWN] - lost_h[ClusterPhase.RETURN])
        returns.append(lost_h[ClusterPhase.RETURN])
    axes.bar(labels, own, label="of the cluster")
    axes.bar(labels, returns, bottom=own, label="of the pull after it")
    _label(axes, "", "hours of devices lost to failures")
    return True


def _size_for_rows(axes: Axes, rows: int) -> None:
    cast("Figure", axes.figure).set_size_inches(12, 1.5 + 0.35 * rows)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(fontsize=8, ncol=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else nan


FIGURES: dict[str, Callable[[SizedReport, Axes], bool]] = {  # each returns whether there is something to see
    "timeline.png": _draw_timeline,
    "devices.png": _draw_devices,
    "throughput.png": _draw_throughput,
    "slaves.png": _draw_slaves,
    "link.png": _draw_link,
    "downtime.png": _draw_downtime,
}
