"""The command `dips simulate`: what a run's transfers, slaves and clusters would do, by its sizes and rates."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dips.commands.new import read_template
from dips.commands.options import AS_JSON
from dips.errors import ConfigError

if TYPE_CHECKING:
    from dips.study.sized_run import SizedReport

BUILT_IN = ("table2",)  # scenarios of this package, in dips/templates


def simulate(
    scenario: Annotated[
        str | None, typer.Argument(metavar="SCENARIO.yaml", help=f"A file, or one of {', '.join(BUILT_IN)}.")
    ] = None,
    template: Annotated[bool, typer.Option("--template", help="Print table2, a scenario to begin with.")] = False,
    as_json: AS_JSON = False,
) -> None:
    """Simulate a run with its sizes: seconds of transfers, standstill of clusters, idle share and peaks of slaves.

    The master, the slaves and the agents decide as in a real run, in virtual time; transfers take what the links give,
    which clusters share fairly at a slave. Rates are given, or fitted to the seconds of a push that was measured.
    Nothing fails, and nothing is learned: for losses there is `dips study`.

    table2 is the production run of the Di-PS paper: rates are fitted to the pushes of its Table 2, and its pulls stand
    beside those simulated.

    Exit codes: 0 done; 2 no scenario named; 78 it is not usable, or too short for a round.

    \b
    Example:
      dips simulate table2
      dips simulate --template > mine.yaml; dips simulate mine.yaml
    """
    if template:
        print(read_template(f"{BUILT_IN[0]}.yaml"), end="")
        return
    if scenario is None:
        raise typer.BadParameter("which scenario? name its file, or print one with --template", param_hint="SCENARIO")
    from dips.study.sized_run import read_scenario, simulate_sizes

    report = simulate_sizes(read_scenario(find_scenario(scenario)))
    if as_json:
        print(json.dumps(asdict(report)))
        return
    Console().print(_draw_clusters(report))
    print(describe_slaves(report))


def find_scenario(name: str) -> Path:
    """Return the file of a scenario that is built in, or that is named by its path. Raises ConfigError."""
    if name in BUILT_IN:
        return Path(str(files("dips").joinpath("templates", f"{name}.yaml")))
    if not Path(name).suffix:
        raise ConfigError(f"{name}: expected a file, as in {name}.yaml, or one of {', '.join(BUILT_IN)}")
    return Path(name)


def _draw_clusters(report: SizedReport) -> Table:
    table = Table(title=f"{report.hours:g} h, {report.versions} versions; seconds", title_justify="left")
    for column in ("", "pushes", "push", "window and update", "pull", "pull measured", "off", "standstill"):
        table.add_column(column, justify="left" if not column else "right")
    for c in report.clusters:
        measured = ("", "") if c.pull_off is None else (f"{c.expected_pull_s:,.1f}", f"{c.pull_off:+.1%}")
        table.add_row(
            c.cluster, str(c.pushes), f"{c.push_s:,.1f}", f"{c.wait_s:,.1f}", f"{c.pull_s:,.1f}", *measured,
            f"{c.standstill:.1%}",
        )  # fmt: skip
    return table


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
