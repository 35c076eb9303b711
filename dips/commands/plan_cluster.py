"""The command `dips plan cluster`: what to run on the machines of a profile, how long a step takes, and why.

Of the commands only this one and `dips profile --changed` know dips/inside/, and load it when they are called.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from dips.commands.options import AS_JSON
from dips.config.reading import read_yaml
from dips.errors import ConfigError
from dips.files import explain_unwritable, write_output

if TYPE_CHECKING:
    from dips.inside.planning.plan import ClusterPlan, Framework
    from dips.inside.planning.simulate import Prediction

COLORS = {"F": "#4477aa", "I": "#228833", "W": "#ccbb44", "B": "#66ccee"}  # of actions; collectives and copies are grey
MOST_DRAWN = 32  # devices in a picture


def cluster_command(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE.yaml", help="The machines and their links.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL.yaml", help="The model's layers and its batch.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan, as YAML.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="torchtitan|megatron|fsdp2|pipeline", help="Only what it runs; print its flags or shares."
        ),
    ] = None,
    csv: Annotated[Path, typer.Option("--csv", help="The schedule, for --for torchtitan.")] = Path("schedule.csv"),
    timeline: Annotated[
        Path | None, typer.Option(help="Draw the step: a .png, or a .json for ui.perfetto.dev.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why, and what the others lose.")] = False,
    as_json: AS_JSON = False,
) -> None:
    """Compute what to run on unequal devices, and predict its step.

    Pipelines over groups of devices are searched and simulated (which layers and micro-batches where, by which
    schedule), and FSDP2, HSDP, FSDP2 with unequal shares, EDiT and several clusters under the outer loop are computed
    on the same scale: samples a second. The last two change what is learnt, too: docs/guides/choosing.md has their
    losses.

    configs/inventories has profiles and models to begin with; `dips profile` measures your own. What nobody measured is
    scaled by FLOP/s and marked as estimated.

    Exit codes: 0 done; 78 a file is not usable, the model fits nowhere, or the framework cannot run any of the plans.

    \b
    Example:
      dips plan cluster profile.yaml model.yaml --explain -o plan.yaml
      dips plan cluster profile.yaml model.yaml --timeline step.png
      dips plan cluster profile.yaml model.yaml --for torchtitan --csv schedule.csv
      dips plan cluster profile.yaml model.yaml --for fsdp2 -o plan.yaml
      dips plan cluster profile.yaml model.yaml --for pipeline -o plan.yaml
    """
    from dips.inside.planning.plan import Framework, explain_plan, hand_over, make_plan, plan_data
    from dips.inside.planning.profile import parse_model, parse_profile
    from dips.inside.planning.timeline import PLANNED, chrome_trace

    framework = _choose_framework(Framework, target)
    machines = parse_profile(read_yaml(profile), str(profile))
    plan = make_plan(machines, parse_model(read_yaml(model), str(model)), framework)
    data = plan_data(plan)
    if as_json:
        print(json.dumps(data))
    else:
        print(describe_plan(plan))
        if plan.stages:
            Console().print(draw_stages(plan))
        Console().print(draw_others(plan))
        for line in explain_plan(plan) if explain else []:
            print(line)
    if output is not None:
        sources = {key: _relate(path, output.parent) for key, path in (("profile", profile), ("model", model))}
        write_output(output, yaml.safe_dump({**data, "made_from": {**sources, "replans": 0}}, sort_keys=False))
    if timeline is not None:
        if plan.prediction is None:
            raise ConfigError(f"--timeline: {plan.best.name} is computed by a formula, which has no timeline")
        if timeline.suffix == ".png":
            draw_timeline(plan.prediction, timeline)
        else:
            write_output(timeline, json.dumps(chrome_trace({PLANNED: plan.prediction.spans}), allow_nan=False))
    if framework is not None:
        handed = hand_over(plan, framework, str(csv))
        if handed.csv:
            write_output(csv, handed.csv)
        if not as_json:
            print("\n".join(handed.flags))


def _relate(path: Path, directory: Path) -> str:
    """Return a file's path from a directory, either of which may be behind a link, from which `..` leads elsewhere."""
    return os.path.relpath(path.parent.resolve() / path.name, directory.resolve())


def _choose_framework(frameworks: type[Framework], target: str | None) -> Framework | None:
    if target is None:
        return None
    if target not in [str(f) for f in frameworks]:
        raise ConfigError(f"--for: expected {' or '.join(frameworks)}, got {target}")
    return frameworks(target)


def describe_plan(plan: ClusterPlan) -> str:
    """Return the plan's name and what it reaches."""
    said = (
        f"{plan.model}: {plan.best.name}\n{plan.best.step_s:.3g} s a step of {plan.samples:g} samples, "
        f"{plan.tokens_s:,.0f} tokens/s, {plan.flops / plan.best.step_s / 1e12:,.0f} TFLOPS"
    )
    return said + (f"; estimated: {', '.join(plan.estimated)}" if plan.estimated else "")


def draw_stages(plan: ClusterPlan) -> Table:
    """A row for each stage, with the worst of its devices."""
    table = Table()
    for column in ("devices", "layers", "micro-batches", "forward + backward", "idle", "peak memory"):
        table.add_column(column, justify="left" if column == "devices" else "right")
    for stage in plan.stages:
        least, most = min(stage.microbatches), max(stage.microbatches)
        table.add_row(
            _name_devices(stage.devices),
            " ".join(f"{a}–{b - 1}" for a, b in stage.layers),
            f"{most}" if least == most else f"{least} to {most}",
            f"{stage.seconds:.3g} s",
            f"{stage.idle:.0%}",
            f"{stage.peak_gb:.1f} of {stage.memory_gb:g} GB",
        )
    return table


def draw_others(plan: ClusterPlan) -> Table:
    """The next three plans, and what each loses; and what is faster but learns otherwise."""
    from dips.inside.planning.plan import compare_plans, show_others

    table = Table(title="instead", title_justify="left", title_style="bold")
    for column in ("", "a step", "against the plan"):
        table.add_column(column, justify="left" if not column else "right")
    for other in show_others(plan):
        table.add_row(other.name, f"{other.step_s:.3g} s", compare_plans(plan, other))
    if plan.half_links_s is not None:
        slower = plan.half_links_s / plan.best.step_s - 1
        table.add_row(
            "this plan, with half the rate between nodes", f"{plan.half_links_s:.3g} s", f"{slower:.0%} slower"
        )
    return table


def _name_devices(devices: tuple[str, ...]) -> str:
    """Nodes, with how many devices of each: c0 ×4, c1 ×4."""
    counts: dict[str, int] = {}
    for device in devices:
        node = device.rpartition(".")[0]
        counts[node] = counts.get(node, 0) + 1
    return ", ".join(f"{node} ×{count}" for node, count in counts.items())


def draw_timeline(prediction: Prediction, path: Path) -> None:
    """Draw the actions of each device over the seconds of a step. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"{path.name} needs matplotlib ({error}): pip install 'di-ps[plot]', or name a .json for ui.perfetto.dev"
        ) from error
    names = list(prediction.idle)[:MOST_DRAWN]
    figure = Figure(figsize=(13, 1 + 0.35 * len(names)), layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(names):
        for span in prediction.spans:
            if span.device == name:
                op = span.action.lstrip("0123456789")[:1]
                known = span.engine == "compute" and op in COLORS
                height = 0.8 if known else 0.25
                axes.broken_barh(
                    [(span.begin_s, span.end_s - span.begin_s)], (row - height / 2, height),
                    facecolors=COLORS[op] if known else "#999999", edgecolor="white", linewidth=0.2,
                )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    for op, color in COLORS.items():
        axes.plot([], [], color=color, lw=6, label=op)
    axes.legend(fontsize=8, ncol=len(COLORS), loc="upper right")
    with explain_unwritable(path):
        figure.savefig(path, dpi=130)
