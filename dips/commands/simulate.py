"""The command `dips simulate`: what a run's transfers, slaves and clusters would do, by its sizes and rates."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dips.commands.new import read_template
from dips.commands.options import AS_JSON
from dips.errors import ConfigError
from dips.files import explain_unwritable

if TYPE_CHECKING:
    from dips.study.sized_run import ClusterReport, SizedReport

BUILT_IN = ("table2", "month")  # scenarios of this package, in dips/templates
MOST_SHOWN = 32  # slaves in the table


def simulate(
    scenario: Annotated[
        str | None, typer.Argument(metavar="SCENARIO.yaml", help=f"A file, or one of {', '.join(BUILT_IN)}.")
    ] = None,
    template: Annotated[bool, typer.Option("--template", help="Print table2, a scenario to begin with.")] = False,
    as_json: AS_JSON = False,
    timeline: Annotated[
        Path | None,
        typer.Option("--timeline", metavar="FILE.json", help="Write when clusters did what, in seconds."),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", metavar="DIR", help="Draw timeline, devices, throughput, slaves, a link, downtime."),
    ] = None,
) -> None:
    """Simulate a run with its sizes: seconds of transfers, standstill of clusters, idle share and peaks of slaves.

    The master, the slaves and the agents decide as in a real run, in virtual time; transfers take what the links give,
    which clusters share fairly at a slave. Rates are given, or fitted to the seconds of a push that was measured.
    Clusters, slaves and the master fail as often as the file says. Nothing is learned: for that there is `dips study`.

    table2 is the production run of the Di-PS paper: rates are fitted to the pushes of its Table 2, and its pulls stand
    beside those simulated. month is that run for 33 days with the failures of its Table 1, which takes some minutes.
    More scenarios are in configs/scenarios.

    Exit codes: 0 done; 2 no scenario named; 78 it is not usable, or too short for a round.

    \b
    Example:
      dips simulate table2
      dips simulate --template > mine.yaml; dips simulate mine.yaml
      dips simulate month --plots month
    """
    if template:
        print(read_template(f"{BUILT_IN[0]}.yaml"), end="")
        return
    if scenario is None:
        raise typer.BadParameter("which scenario? name its file, or print one with --template", param_hint="SCENARIO")
    from dips.study.figures import draw_figures, find_matplotlib
    from dips.study.sized_run import read_scenario, simulate_sizes

    if plots is not None:
        find_matplotlib()
    read = read_scenario(find_scenario(scenario))
    _require_writable(timeline, plots)
    report = simulate_sizes(read)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        console = Console()
        console.print(_draw_clusters(report))
        console.print(_draw_slaves(report))
        print(describe_slaves(report))
        print(describe_run(report))
    if timeline is not None:
        write_timeline(report, timeline)
    if plots is not None:
        draw_figures(report, plots)


def find_scenario(name: str) -> Path:
    """Return the file of a scenario that is built in, or that is named by its path. Raises ConfigError."""
    if name in BUILT_IN:
        return Path(str(files("dips").joinpath("templates", f"{name}.yaml")))
    if not Path(name).suffix:
        raise ConfigError(f"{name}: expected a file, as in {name}.yaml, or one of {', '.join(BUILT_IN)}")
    return Path(name)


def _draw_clusters(report: SizedReport) -> Table:
    """A row for each kind of cluster: medians of their rounds, means of their shares."""
    kinds: dict[str, list[ClusterReport]] = {}
    for cluster in report.clusters:
        kinds.setdefault(cluster.cluster, []).append(cluster)
    columns = ["", "pushes", "push", "window and update", "pull", "pull measured", "off", "standstill"]
    fails = bool(report.failures)
    title = f"{report.hours:g} h, {report.versions} versions; seconds"
    table = Table(title=title, title_justify="left")
    for column in [*columns, *(("down", "steps lost") if fails else ())]:
        table.add_column(column, justify="left" if not column else "right")
    for name, each in kinds.items():
        push_s, wait_s, pull_s = (median(getattr(c, key) for c in each) for key in ("push_s", "wait_s", "pull_s"))
        expected_s = each[0].expected_pull_s
        measured = ("", "") if expected_s is None else (f"{expected_s:,.1f}", f"{expected_s / pull_s - 1.0:+.1%}")
        table.add_row(
            name if len(each) == 1 else f"{name} ×{len(each)}", f"{median(c.pushes for c in each):g}", f"{push_s:,.1f}",
            f"{wait_s:,.1f}", f"{pull_s:,.1f}", *measured, f"{fmean(c.standstill for c in each):.1%}",
            *((f"{fmean(c.down for c in each):.1%}", f"{fmean(c.lost for c in each):.1%}") if fails else ()),
        )  # fmt: skip
    return table


def _draw_slaves(report: SizedReport) -> Table:
    """The slaves that are idle the least, the least idle first."""
    busiest = sorted(report.slaves, key=lambda slave: slave.idle)[:MOST_SHOWN]
    table = Table(title=f"the busiest of {len(report.slaves)} slaves", title_justify="left")
    for column in ("", "idle", "works", "receives at the peak", "sends at the peak"):
        table.add_column(column, justify="left" if not column else "right")
    for slave in busiest:
        peaks = (f"{gbit:.2f} Gbit/s" for gbit in (slave.peak_received_gbit, slave.peak_sent_gbit))
        table.add_row(slave.slave, f"{slave.idle:.1%}", f"{slave.worked:.1%}", *peaks)
    return table


def describe_run(report: SizedReport) -> str:
    """Return what failed and was up, and the master's share of a core, in sentences."""
    lines = [
        f"the master took {report.master_s:,.1f} s of a core here, {report.master_s / 36 / report.hours:.3f} % of one"
    ]
    if report.failures:
        failed = ", ".join(f"{number} of {what}" for what, number in sorted(report.failures.items()))
        lines += [
            f"failures: {failed}",
            f"devices were up for {report.devices_up:.2%} of their time, all servers for {report.servers_up:.3%}",
        ]
    return "\n".join(lines)


def describe_slaves(report: SizedReport) -> str:
    """Return what the slaves did, in sentences: the busiest of each kind."""
    least = min(report.slaves, key=lambda slave: slave.idle)
    busy = max(slave.busy for slave in report.slaves)
    received = max(slave.peak_received_gbit for slave in report.slaves)
    sent = max(slave.peak_sent_gbit for slave in report.slaves)
    measured = "" if report.expected_at_once_gbit is None else f", {report.expected_at_once_gbit:.1f} as measured"
    lines = [
        f"slaves are idle for at least {least.idle:.1%} of the time; {least.slave} works for {least.worked:.1%},",
        f"and would receive for {least.received:.1%} and send for {least.sent:.1%} at the full rate of its link",
        f"something is under way at a slave for at most {busy:.1%} of the time, since clusters' links are slower",
        f"peaks at a slave, as means over 10 s: {received:.1f} Gbit/s received, {sent:.1f} sent",
        f"{len(report.clusters)} pulls at once: {report.at_once_gbit:.1f} Gbit/s at a slave by these rates{measured}",
    ]
    two = {c.cluster: None for c in report.clusters if c.two_rates}
    if two:
        lines.append(f"rates of pushes and of pulls are not the same, and both are given: {', '.join(two)}")
    return "\n".join(lines)


def _require_writable(timeline: Path | None, plots: Path | None) -> None:
    """Raise ConfigError if a file or directory cannot be written: better before a simulation than after it."""
    with explain_unwritable(timeline):
        if timeline is not None and timeline.exists():
            timeline.open("a").close()
        elif timeline is not None:  # a run that gives nothing leaves no empty file
            TemporaryFile(dir=timeline.parent).close()
    with explain_unwritable(plots):
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=plots).close()


# ---- timeline -------------------------------------------------------------------------------------------------------


def write_timeline(report: SizedReport, path: Path) -> None:
    """Write as JSON when each cluster took part, pushed, waited, pulled and was down, and its steps by the hour, in
    seconds; and the rates of the first slave's link. Raises ConfigError if it cannot be written.
    """
    with explain_unwritable(path):
        path.write_text(json.dumps(asdict(report.timeline)))
