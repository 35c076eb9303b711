"""The command `dips plan memory`, and the group of `dips plan`: computes the memory, disk and traffic that a run will
need, and what they cost.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from dips.codecs import Codec
from dips.commands.options import AS_JSON
from dips.commands.plan_cluster import cluster_command
from dips.commands.plan_site import site_command
from dips.commands.planning import (
    KEEP_SNAPSHOTS,
    SNAPSHOT_BYTES,
    MemoryPlan,
    default_section,
    kubernetes_resources,
    plan_cluster,
    plan_memory,
    plan_round,
    plan_slave,
    share_equally,
)
from dips.config import ClusterFile, RunFile, load_cluster, load_run
from dips.errors import ConfigError
from dips.protocol.grouping import PLAIN_GROUPING, Grouping
from dips.protocol.manifest import Manifest
from dips.protocol.placement import place_layers

SLAVES, RANKS, ROUNDS, CPUS = 2, 8, 10_000, 4
EXPORTS = 2  # files of `on_version`: the last version's, and the one that is written
GB, MB, GBIT_BYTES = 1e9, 1e6, 1.25e8
DISK_MB, LINK_GBIT = 500.0, 1.0  # rates by default: an SSD of a cloud, and a slow link between two places

words = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Compute what a run will need, before it is made."
)


@words.command("memory")
def memory_command(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A run file with slaves, slots and codecs; else defaults.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster file with overlap and install; else defaults.")
    ] = None,
    parameters: Annotated[int | None, typer.Option(min=1, help="Assume N parameters, in equal shares.")] = None,
    model: Annotated[Path | None, typer.Option(help="Read the model from a safetensors file's header.")] = None,
    factory: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Read the model from this function's module, without memory."),
    ] = None,
    slaves: Annotated[int, typer.Option(min=1, help="Number of slaves without --config.")] = SLAVES,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks in a cluster.")] = RANKS,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the whole run, for the ledger's size.")] = ROUNDS,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs of a slave, for --kubernetes.")] = CPUS,
    disk_mb: Annotated[
        float, typer.Option("--disk-mb", min=0.001, help="Megabytes a second that a slave's disk writes and reads.")
    ] = DISK_MB,
    link_gbit: Annotated[
        float, typer.Option("--link-gbit", min=0.001, help="Gigabits a second of a cluster's link to the slaves.")
    ] = LINK_GBIT,
    as_json: AS_JSON = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Print requests and limits of each pod.")] = False,
) -> None:
    """Compute memory, disk and traffic of a run, which need not exist yet.

    A slave prints the same sum when it starts, and refuses to start if memory is short. Ranks need host memory beside
    the model. Disks have room for the newest two snapshots, the one that is written, those that `keep_every` keeps (if
    `keep_most` bounds them), with a mirror two more that stay while it lags, and, without `initial_model`, the first
    model, which `dips seed` brings and which stays.

    The last lines are what a round costs at these rates of disk and link. With `durability: commit`, the default, a
    version counts when it is on every slave's disk: a round waits for that. Hold the sum against the time of the inner
    steps between two pushes. The inner steps overlap the transfers only with `overlap: full`.

    Exit codes: 0 done; 2 no model named, or several; 78 a file cannot be read.

    \b
    Example:
      dips plan memory --parameters 7000000000 --slaves 4 --disk-mb 125 --link-gbit 10
      dips plan memory --config dips.yaml --factory mymodel:build --ranks 64
      dips plan memory --config dips.yaml --parameters 1000000000 --kubernetes
    """
    named = [option for option in (parameters, model, factory) if option is not None]
    if len(named) != 1:
        raise typer.BadParameter("name the model by one of --parameters, --model and --factory", param_hint="plan")
    run_file = load_run(config) if config is not None else None
    cluster_file = load_cluster(cluster) if cluster is not None else None
    shares = find_shares(run_file, parameters, model, factory, slaves)
    rates = disk_mb * MB, link_gbit * GBIT_BYTES
    plan = make_plan(run_file, cluster_file, shares, ranks, rounds, rates)
    if kubernetes:
        proposed = kubernetes_resources(plan, cpus)
        print(
            json.dumps(proposed) if as_json else yaml.safe_dump(proposed, sort_keys=False), end="\n" if as_json else ""
        )
    elif as_json:
        print(json.dumps(asdict(plan)))
    else:
        Console().print(draw_plan(plan))
        print(describe_cluster(plan))


words.command("site")(site_command)
words.command("cluster")(cluster_command)
Shares = list[tuple[str, int, int]]  # name, layers and parameters of each slave


def make_plan(
    run_file: RunFile | None,
    cluster_file: ClusterFile | None,
    shares: Shares,
    ranks: int,
    rounds: int,
    rates: tuple[float, float] = (DISK_MB * MB, LINK_GBIT * GBIT_BYTES),
) -> MemoryPlan:
    """Return the plan for these shares and rates (of disk and link, in bytes a second); sections without a file have
    their defaults.
    """
    shared = run_file.shared if run_file else cluster_file.shared if cluster_file else None
    codec, pull_codec = (shared.codec, shared.pull_codec) if shared else (Codec.FP32, Codec.FP32)
    sections = {s.name: s for s in run_file.slaves} if run_file else {}
    kept = KEEP_SNAPSHOTS + (run_file.master.keep_most if run_file and run_file.master.keep_every else 0)
    planned = [
        plan_slave(sections.get(name) or default_section(name), layers, numel, pull_codec, kept)
        for name, layers, numel in shares
    ]
    total = sum(numel for _, _, numel in shares)
    of_cluster = plan_cluster(total, ranks, codec, pull_codec, cluster_file)
    cost = plan_round(planned, of_cluster, *rates, KEEP_SNAPSHOTS)
    exports = EXPORTS if run_file and run_file.master.on_version else 0
    return plan_memory(total, planned, of_cluster, cost, rounds, exports)


def draw_plan(plan: MemoryPlan) -> Table:
    table = Table(title=f"{plan.model:,} parameters", title_justify="left", title_style="bold")
    for column in ("", "layers", "parameters", "memory", "disk"):
        table.add_column(column, justify="left" if not column else "right")
    for s in plan.slaves:
        layers = str(s.layers) if s.layers else "–"
        table.add_row(s.name, layers, f"{s.parameters:,}", _gigabytes(s.memory_bytes), _gigabytes(s.disk_bytes))
    table.add_row("master", "", "", _gigabytes(plan.master_memory_bytes), _gigabytes(plan.master_disk_bytes))
    return table


def describe_cluster(plan: MemoryPlan) -> str:
    c, heaviest = plan.cluster, max(plan.slaves, key=lambda slave: slave.memory_bytes)
    cost, snapshot = plan.round, _gigabytes(SNAPSHOT_BYTES * heaviest.parameters)
    return (
        f"heaviest slave: {heaviest.said}\n"
        f"a cluster of {c.ranks} ranks: {_gigabytes(c.rank_bytes)} of host memory for each rank, beside the model\n"
        f"a round, with links of {cost.link_rate / MB:,.0f} MB/s and disks of {cost.disk_rate / MB:,.0f} MB/s: "
        f"{cost.total_s:,.1f} s beside the inner steps\n"
        f"  push  {_gigabytes(c.push_bytes)} on a cluster's link: {cost.push_s:,.1f} s\n"
        f"  write {snapshot} on the heaviest slave's disk, before the version counts: {cost.persist_s:,.1f} s\n"
        f"  pull  {_gigabytes(c.pull_bytes)} on a cluster's link: {cost.pull_s:,.1f} s\n"
        f"a slave that starts reads {KEEP_SNAPSHOTS} snapshots or more before it serves: {cost.start_s:,.1f} s\n"
        f"disks: room for {heaviest.snapshots} snapshots of {snapshot}, and without initial_model for the first model\n"
        "a mirror takes as many bytes a version"
    )


def find_shares(
    run_file: RunFile | None,
    parameters: int | None,
    model: Path | None = None,
    factory: str | None = None,
    slaves: int = SLAVES,
) -> Shares:
    """Return each slave's share of the given model."""
    names = [s.name for s in run_file.slaves] if run_file else [f"slave-{i}" for i in range(slaves)]
    if parameters is not None:
        return [(name, 0, numel) for name, numel in zip(names, share_equally(parameters, len(names)), strict=True)]
    grouping = run_file.shared.grouping if run_file else PLAIN_GROUPING
    manifest = _read_manifest(model, factory, grouping)
    placed = place_layers(manifest, names)
    return [(name, len(layers), sum(manifest.layers[i].numel for i in layers)) for name, layers in placed]


def _read_manifest(model: Path | None, factory: str | None, grouping: Grouping) -> Manifest:
    from dips.client.preflight.peers import manifest_of_factory, manifest_of_file

    if model is not None:
        return manifest_of_file(model, grouping)
    assert factory is not None
    try:
        return manifest_of_factory(factory, grouping)
    except ImportError as error:  # torch is not on every machine
        raise ConfigError(f"--factory needs torch ({error}): give --model or --parameters instead") from error


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / GB:,.2f} GB"
