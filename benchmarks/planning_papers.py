"""Published figures of EDiT, SpanTrain and Zorse beside those of our formulas and simulator; `planning --part papers`.

Where a paper draws a figure without numbers, the row has what its text claims. Constants that no paper gives are in the
notes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, exp, inf, log
from pathlib import Path

from benchmarks.harness import Bench
from benchmarks.planning import SEQUENCE, ZORSE, read_inventory, zorse_planner
from dips.errors import ConfigError
from dips.inside.planning.group import DeviceGroups, cut_evenly, list_groupings
from dips.inside.planning.profile import (
    EFFICIENCY,
    LAUNCH_S,
    TERA,
    ClusterProfile,
    parse_model,
    parse_profile,
    ring_seconds,
)
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.search import (
    PipelineChoice,
    Planner,
    RankedPlan,
    describe_choice,
    hide_sync,
    parameter_costs,
)
from dips.inside.planning.simulate import PassSeconds, Prediction, SimulatedPipeline, bound_step, simulate

Accept = Callable[[PipelineChoice], bool]


def compare_papers(bench: Bench, plot: Path | None) -> None:
    """Each figure of the papers that a formula or the simulator can give, beside the published one."""
    _compare_table_6(bench)
    _compare_table_2(bench)
    figure_9 = _compare_spantrain(bench)
    figures = [figure_9, *_compare_zorse(bench)]
    if plot is not None:
        draw(figures, plot)


@dataclass(frozen=True, slots=True)
class Curves:
    """A figure to draw: lines over a common axis, and points of the paper."""

    title: str
    axis: str
    x: Sequence[float | str]
    lines: Mapping[str, Sequence[float]]
    points: Mapping[str, tuple[float, float]]  # by the name of the line they belong to


def draw(figures: Sequence[Curves], path: Path) -> None:
    """Draw the figures side by side."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    sheet = Figure(figsize=(6 * len(figures), 4.5), layout="constrained")
    for axes, figure in zip(sheet.subplots(1, len(figures), squeeze=False)[0], figures, strict=True):
        for name, y in figure.lines.items():
            (line,) = axes.plot(figure.x, y, marker=".", label=name)
            if name in figure.points:
                axes.plot(*figure.points[name], marker="*", ms=14, color=line.get_color(), ls="")
        if all(isinstance(x, float) for x in figure.x):
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_title(figure.title, fontsize=10)
        axes.set_xlabel(figure.axis)
        axes.legend(fontsize=8)
    sheet.savefig(path, dpi=130)


# ---- EDiT ------------------------------------------------------------------------------------------------------------

LAGS, REPEATS = (0, 1.5, 2.5, 3.5, 4.5), (0, 10, 20, 30, 40)
TABLE_6: Mapping[str, tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]] = {
    "random": (
        (225.75, 175.21, 150.26, 130.94, 115.29),
        (236.50, 228.06, 219.72, 214.36, 209.44),
        (237.45, 230.05, 224.38, 219.49, 214.53),
    ),
    "consistent": (
        (225.75, 175.12, 150.03, 130.80, 115.94),
        (236.50, 181.20, 154.12, 134.00, 118.47),
        (237.45, 230.12, 227.58, 225.08, 223.07),
    ),
    "bandwidth": (
        (225.75, 205.71, 136.64, 105.06, 85.18),
        (236.50, 234.74, 236.20, 236.46, 236.39),
        (237.45, 237.85, 238.04, 237.73, 238.03),
    ),
}  # EDiT, Table 6: TFLOPS of Baseline, EDiT and A-EDiT
NODES, TAU = 8, 128


def fit_table_6() -> tuple[float, float, float]:
    """Return the three constants, by least squares on the baseline's rows alone.

    Seconds of the baseline's step; the share of a step that one repetition of the inter-node communication takes; and
    the share of a step at which it is no longer hidden.
    """
    base = TABLE_6["random"][0]
    step = sum(l * l for l in LAGS) / sum(l * (base[0] / b - 1) for l, b in zip(LAGS, base, strict=True))
    shown = [base[0] / b for b in TABLE_6["bandwidth"][0]][2:]
    mean_x, mean_y = statistics.mean(REPEATS[2:]), statistics.mean(shown)
    share = sum((x - mean_x) * (y - mean_y) for x, y in zip(REPEATS[2:], shown, strict=True)) / sum(
        (x - mean_x) ** 2 for x in REPEATS[2:]
    )
    return step, share, mean_y - share * mean_x


def predict_table_6() -> dict[str, list[list[float]]]:
    """Return the 45 numbers by closed forms: a lag waits for the slowest node, or for nobody; a sync hides under a
    forward.
    """
    step, share, offset = fit_table_6()
    top = TABLE_6["random"][0][0]
    edit, aedit = (step * top / TABLE_6["random"][k][0] for k in (1, 2))
    rng = random.Random(0)

    def slowest_lag(lag: float) -> float:
        """Seconds of waiting a step, where each step's lag hits a node at random and nodes meet every τ steps."""
        trials = 400
        total = 0.0
        for _ in range(trials):
            hits = [0] * NODES
            for _ in range(TAU):
                hits[rng.randrange(NODES)] += 1
            total += max(hits) * lag
        return total / trials / TAU

    def rate(seconds: float) -> float:
        return top * step / seconds

    made: dict[str, list[list[float]]] = {"random": [[], [], []], "consistent": [[], [], []], "bandwidth": [[], [], []]}
    for lag, repeat in zip(LAGS, REPEATS, strict=True):
        made["random"][0].append(rate(step + lag))
        made["random"][1].append(rate(edit + slowest_lag(lag)))
        made["random"][2].append(rate(aedit + lag / NODES))
        made["consistent"][0].append(rate(step + lag))
        made["consistent"][1].append(rate(edit + lag))
        made["consistent"][2].append(rate(1 / (((NODES - 1) / aedit + 1 / (aedit + lag)) / NODES)))
        made["bandwidth"][0].append(rate(step * max(1.0, offset + share * repeat)))
        exposed = hide_sync(share * max(repeat, 1) * step, edit / 3) / TAU
        made["bandwidth"][1].append(rate(edit + exposed))
        made["bandwidth"][2].append(rate(aedit + exposed))
    return made


def _compare_table_6(bench: Bench) -> None:
    step, share, offset = fit_table_6()
    made = predict_table_6()
    worst = max(
        abs(ours / paper - 1)
        for kind, rows in TABLE_6.items()
        for row, mine in zip(rows, made[kind], strict=True)
        for paper, ours in zip(row, mine, strict=True)
    )
    bench.row("EDiT Table 6: worst of 45", 100 * worst, "%", against="a bar", of=5.0, least=1.0, less=True)
    bench.note(
        f"EDiT: step {step:.2f} s, communication {share:.4f} of a step a repetition, hidden below {1 - offset:.2f}"
    )


# ---- SpanTrain -------------------------------------------------------------------------------------------------------

SCALES = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # of setting 1: how much faster all transfers are, beside computing
# S§4.2 and Figure 9: least and most gain over each, in setting 1.
PUBLISHED = {"FSDP": (2.05, 2.11), "DDP": (2.3, 2.38), "GPipe": (1.13, 1.71), "1F1B": (1.04, 1.57)}
MICROBATCHES = (1, 2, 4, 8, 16)


def spantrain_planner(setting: int, batch: int = 128) -> Planner:
    """Return GPT-2 on SpanTrain's ten servers."""
    profile = parse_profile(read_inventory(f"spantrain-{setting}"), "spantrain")
    return Planner(profile, replace(parse_model(read_inventory("gpt-2"), "gpt-2"), batch=batch))


def slow_cloud(planner: Planner, gbit: float) -> Planner:
    """Return the planner with another rate between the cloud and everything else."""
    links = {
        a: {b: replace(link, gbit=gbit) if "cloud" in (a, b) and a != b else link for b, link in row.items()}
        for a, row in planner.profile.links.items()
    }
    return Planner(replace(planner.profile, links=links), planner.model)


def speed_up_links(planner: Planner, factor: float) -> Planner:
    """Return the planner with links between nodes on which a transfer takes so much less, its latency included."""
    links = {
        a: {b: replace(link, latency_us=link.latency_us / factor) for b, link in row.items()}
        for a, row in planner.profile.links.items()
    }
    return Planner(replace(planner.profile, links=links).scale_links(factor), planner.model)


def _with_servers(profile: ClusterProfile, count: int) -> ClusterProfile:
    """Return SpanTrain's machines with so many servers at the edge, and as many devices at the end (§4.5)."""
    cloud = [node for node in profile.nodes if node.site == "cloud"]
    edge, end = (next(node for node in profile.nodes if node.site == site) for site in ("edge", "end"))
    more = [replace(node, name=f"{node.site}-{i}") for node in (edge, end) for i in range(count)]
    return replace(profile, nodes=(*cloud, *more))


def best_pipeline(planner: Planner, accept: Callable[[PipelineChoice], bool] = lambda _: True) -> RankedPlan:
    """Return the fastest pipeline of a search, tuned. Raises ConfigError if none fits."""
    ranked = [plan for plan in planner.search(accept).ranked if plan.choice is not None]
    if not ranked or ranked[0].choice is None:
        raise ConfigError("no pipeline fits")
    choice, prediction = planner.finish(ranked[0].choice)
    return replace(ranked[0], step_s=prediction.seconds, choice=choice, name=describe_choice(choice))


def replicate_seconds(planner: Planner) -> float:
    """Seconds of a step of DDP: equal shares, and gradients all-reduced over a ring beside the backward."""
    devices, n = planner.devices, len(planner.devices)
    ring = planner.profile.ring(devices)
    reduces = [2 * ring_seconds(ring, n, l.parameters * planner.model.gradient_bytes) for l in planner.layers]
    return planner.overlap_layers(devices, [ceil(planner.model.batch / n)] * n, [0.0] * len(reduces), reduces)


def uniform_seconds(planner: Planner, schedule: ScheduleName) -> float:
    """Seconds of the best pipeline that knows of no differences: equal groups in order, equally many layers."""
    best, devices, layers = inf, planner.devices, len(planner.layers)
    for p in (p for p in range(2, layers + 1) if len(devices) % p == 0):
        groups = tuple(map(tuple, cut_evenly(devices, p)))
        cuts = tuple(round(layers * i / p) for i in range(p + 1))
        for samples in MICROBATCHES:
            with suppress(ConfigError):  # memory, fewer micro-batches than devices, or ranks that wait for each other
                pipeline = planner.make_pipeline(PipelineChoice(schedule, groups, cuts, samples))
                if bound_step(pipeline) < best:
                    best = min(best, simulate(pipeline, spans=False).seconds)
    return best


def compare_baselines(planner: Planner) -> tuple[RankedPlan, dict[str, float]]:
    """Return our best pipeline, and what it gains over FSDP, DDP, GPipe and 1F1B."""
    best = best_pipeline(planner)
    seconds = {
        "FSDP": planner.shard_fully(planner.devices, equal=True).step_s,
        "DDP": replicate_seconds(planner),
        "GPipe": uniform_seconds(planner, ScheduleName.GPIPE),
        "1F1B": uniform_seconds(planner, ScheduleName.ONE_F_ONE_B),
    }
    return best, {name: took / best.step_s for name, took in seconds.items()}


def find_crossing(x: Sequence[float], y: Sequence[float], target: float) -> float | None:
    """Return where a curve first has a value, on logarithmic axes, or None if it does not."""
    for (x0, y0), (x1, y1) in pairwise(zip(x, y, strict=True)):
        if min(y0, y1) <= target <= max(y0, y1):
            part = 0.0 if y0 == y1 else log(target / y0) / log(y1 / y0)
            return exp(log(x0) + part * log(x1 / x0))
    return None


def _compare_spantrain(bench: Bench) -> Curves:
    """Throughput of SpanTrain's plan over its baselines; published ratios beside ours, no bar."""
    one = spantrain_planner(1)
    scales = SCALES[::2] if bench.quick else SCALES
    gains: dict[str, list[float]] = {name: [] for name in PUBLISHED}
    rates = []
    for scale in scales:
        best, found = compare_baselines(speed_up_links(one, scale))
        rates.append(best.rate)
        for name, gain in found.items():
            gains[name].append(gain)
        bench.say(f"setting 1, links × {scale:g}: {best.name}; " + ", ".join(f"{n} {g:.3g}" for n, g in found.items()))
    points: dict[str, tuple[float, float]] = {}
    for name, (least, most) in PUBLISHED.items():
        bench.row(f"SpanTrain setting 1: over {name}", gains[name][0], "×", against=f"paper {least}–{most}")
        for value in (most, least):
            at = find_crossing(scales, gains[name], value)
            if at is None:
                bench.note(f"SpanTrain: no speed of the transfers has the paper's {value} over {name}")
            else:
                points[name] = at, value
                bench.row(f"SpanTrain setting 1: the paper's {value} over {name} where transfers are", at, "× as fast")
    _, two = compare_baselines(spantrain_planner(2))
    for name, paper in {"FSDP": "1.61–1.76", "DDP": "1.74–1.85", "GPipe": "1.13–1.71", "1F1B": "1.04–1.57"}.items():
        bench.row(f"SpanTrain setting 2: over {name}", two[name], "×", against=f"paper {paper}")
    for gbit in (1.0,) if bench.quick else (1.0, 0.5, 0.25, 0.05):
        rate = best_pipeline(slow_cloud(one, gbit)).rate
        bench.row(f"SpanTrain setting 1, cloud at {gbit:g} Gbit/s", rate, "samples/s", against="0.1", of=rates[0])
    big = best_pipeline(spantrain_planner(1, batch=256)).rate
    bench.row("SpanTrain batch 256 over 128", 100 * (big / rates[0] - 1), "%", against="paper 6.8–16.2")
    for servers in (1, 3) if bench.quick else (1, 3, 6):
        _, found = compare_baselines(Planner(_with_servers(one.profile, servers), one.model))
        for name, mean in {"FSDP": 2.79, "GPipe": 1.64}.items():
            bench.row(
                f"SpanTrain Fig. 13, {servers} servers: over {name}", found[name], "×", against=f"paper's mean {mean}"
            )

    def whole_sites(choice: PipelineChoice) -> bool:
        """No second level: a first-level group is one stage."""
        return all(len({d.split("-")[0] for d in group}) == 1 for group in choice.groups) and len(choice.groups) <= 3

    flat = best_pipeline(one, whole_sites).rate
    bench.row("SpanTrain without a second level", 100 * (flat / rates[0] - 1), "%", against="paper −11, −12")
    bench.note(
        f"SpanTrain: GPT-2, sequences of 512, {EFFICIENCY:.0%} of the FLOP/s, {LAUNCH_S:g} s a layer, latencies "
        "of 1 and 0.2 ms: ours, not the paper's; GPipe and 1F1B: equal groups and layers, the best micro-batch"
    )
    return Curves(
        "SpanTrain setting 1: gain over",
        "transfers, × as fast beside computing as we take the paper's",
        scales,
        gains,
        points,
    )


# ---- Zorse -----------------------------------------------------------------------------------------------------------

CUT = {"a": {"H100-NVL": 2, "A100-80": 2}, "b": {}, "c": {"V100": 2, "T4": 2}}  # kinds of a site in pieces, §6.2
TABLE_5 = {
    ("a", "llama-7b"): 4370.56, ("a", "llama-13b"): 4917.87,
    ("a", "llama-33b"): 5281.64, ("a", "llama-65b"): 5239.13,
    ("b", "llama-7b"): 3412.88, ("b", "llama-13b"): 2965.64, ("b", "llama-33b"): 2658.29,
    ("c", "llama-7b"): 3936.94, ("c", "llama-13b"): 3357.97, ("c", "llama-33b"): 1548.60,
}  # fmt: skip
MOST_PLAYS = 6  # pipelines that are simulated of one grouping
ROOMY_GB = 1e6
FIGURE_3_BATCH = 256  # sequences: with a step of a million tokens nothing of 7 B fits without offload
Groups = tuple[tuple[str, ...], ...]


def zorse_groups(profile: ClusterProfile, cluster: str) -> Groups:
    """Return the groups of §6.2 of a cluster, or of a part of it: by site and kind, some kinds in halves."""
    found: dict[tuple[str, str], list[str]] = {}
    for device, node in profile.places.items():
        found.setdefault((node.site, node.kind), []).append(device)
    parts = ((group, CUT[cluster].get(kind, 1)) for (_, kind), group in found.items())
    return tuple(tuple(part) for group, pieces in parts for part in cut_evenly(group, pieces))


def _list_choices(planner: Planner, groups: Groups) -> Iterator[PipelineChoice]:
    """Yield what the planner would try on these groups, with layers cut by speed and, for memory's sake, evenly."""
    layers = len(planner.layers)
    for choice in planner.list_choices([DeviceGroups(groups, "the paper")]):
        parts = len(choice.groups) * choice.ministages
        yield choice
        yield replace(choice, cuts=tuple(round(layers * i / parts) for i in range(parts + 1)))


def play_best(
    planner: Planner,
    groups: Groups,
    accept: Accept = lambda _: True,
    alter: Callable[[PipelineChoice, SimulatedPipeline], SimulatedPipeline | None] = lambda _, pipeline: pipeline,
) -> tuple[PipelineChoice, Prediction] | None:
    """Return the best pipeline over these groups that fits, and its step; None if none fits.

    alter   changes a pipeline before it is played, or refuses it by None
    """
    bounds: list[tuple[float, int, PipelineChoice, SimulatedPipeline]] = []
    for number, choice in enumerate(_list_choices(planner, groups)):
        with suppress(ConfigError):
            if accept(choice) and (made := alter(choice, planner.make_pipeline(choice))) is not None:
                bounds.append((bound_step(made), number, choice, made))
    best: tuple[PipelineChoice, Prediction] | None = None
    for bound, _, choice, pipeline in sorted(bounds, key=lambda row: row[:2])[:MOST_PLAYS]:
        if best is not None and bound >= best[1].seconds:
            break
        with suppress(ConfigError):
            played = simulate(pipeline, spans=False)
            if best is None or played.seconds < best[1].seconds:
                best = choice, played
    return best


def tflops_of(planner: Planner, seconds: float) -> float:
    return planner.model.flops / seconds / TERA


def use_of_kinds(planner: Planner, choice: PipelineChoice) -> dict[str, float]:
    """FLOPs of each kind of device in a step, over what it could do in a second (HFU × seconds)."""
    done: dict[str, list[float]] = {}
    passes, p = (4 if planner.model.recompute else 3), len(choice.groups)
    for s, stage in enumerate(planner.make_pipeline(choice).stages):
        parts = [(choice.cuts[v * p + s], choice.cuts[v * p + s + 1]) for v in range(choice.ministages)]
        flops = passes * choice.samples * sum(planner.layers[i].flops for a, b in parts for i in range(a, b))
        for device in stage.devices:
            kind = planner.profile.places[device.name].kind
            done.setdefault(kind, []).append(
                len(device.microbatches) * flops / planner.profile.kinds[kind].tflops / TERA
            )
    return {kind: statistics.mean(found) for kind, found in done.items()}


def only_kinds(planner: Planner, kinds: Sequence[str]) -> Planner:
    """Return the planner of the nodes of some kinds alone."""
    nodes = tuple(node for node in planner.profile.nodes if node.kind in kinds)
    sites = {n.site for n in nodes} | {n.name for n in nodes}
    links = {
        a: {b: link for b, link in row.items() if b in sites} for a, row in planner.profile.links.items() if a in sites
    }
    return Planner(replace(planner.profile, nodes=nodes, links=links), planner.model)


def _compare_table_2(bench: Bench) -> None:
    costs = parameter_costs(layers=24, parameters=1.0, ministages=4, devices=8, microbatches=16)
    for name, want in {"Zorse": (12, 0, 48), "PP + ZeRO-2": (24, 0, 48), "PP + ZeRO-3": (2, 2.75, 768)}.items():
        cost = costs[name]
        same = (cost.materialised, cost.sharded, cost.gathers) == want
        bench.row(f"Zorse Table 2: {name}, all three as printed", float(same), "", against="yes", of=1.0, least=1.0)


def _compare_zorse(bench: Bench) -> list[Curves]:
    """Tables and figures by the groups of §6.2, no bar: efficiency is a constant of ours."""
    for (cluster, size), published in TABLE_5.items():
        if bench.quick and size != "llama-7b":
            continue
        planner = zorse_planner(cluster, size)
        name = f"Zorse Table 5: {cluster}, {size}"
        found = play_best(planner, zorse_groups(planner.profile, cluster))
        if found is None:
            bench.note(f"{name}: fits in none of our pipelines over the paper's groups")
            continue
        bench.row(name, tflops_of(planner, found[1].seconds), "TFLOPS", against="paper", of=published)
        bench.say(f"{name}: {describe_choice(found[0])}")
    _compare_figure_3(bench)
    figure_8 = _compare_figure_8(bench)
    _compare_figure_9(bench)
    figure_11 = _compare_figure_11(bench)
    for cluster in ZORSE:
        planner = zorse_planner(cluster, "llama-7b")
        begun = time.process_time()
        count = len(list_groupings(planner.profile, planner.speed_of))
        took = time.process_time() - begun
        bench.row(f"Zorse Fig. 12: {cluster}, {count} groupings", took, "s", against="paper: all within 3 minutes")
    bench.note("Zorse Fig. 12: processor seconds; --part search has those of whole searches")
    bench.note(f"Zorse: {EFFICIENCY:.0%} of peak FLOP/s on every device, vendors' links, layers by speed or evenly cut")
    return [figure_8, figure_11]


def _compare_figure_3(bench: Bench) -> None:
    """PP with ZeRO-2, which holds all parameters, and with ZeRO-3, which gathers them for each micro-batch."""
    for size in ("edit-1b", "llama-7b") if bench.quick else ("edit-1b", "edit-3b", "llama-7b", "llama-13b"):
        whole = zorse_planner("b", "llama-7b")
        model = replace(parse_model(read_inventory(size), size), sequence=SEQUENCE["b"], batch=FIGURE_3_BATCH)
        nodes = tuple(n for n in whole.profile.nodes if n.name in ("v100-0", "t4-0"))
        planner = Planner(replace(whole.profile, nodes=nodes), model)
        kinds = {name: replace(kind, memory_gb=ROOMY_GB) for name, kind in planner.profile.kinds.items()}
        roomy, groups = Planner(replace(planner.profile, kinds=kinds), model), zorse_groups(planner.profile, "b")

        def plain(choice: PipelineChoice) -> bool:
            return choice.schedule is ScheduleName.BREADTH_FIRST and choice.ministages == 1 and not choice.offload

        def zero_3(
            choice: PipelineChoice, made: SimulatedPipeline, real: Planner = planner
        ) -> SimulatedPipeline | None:
            return gather_always(real, choice, made)

        plans = {"ZeRO-2": play_best(planner, groups, plain), "ZeRO-3": play_best(roomy, groups, plain, zero_3)}
        for name, found in plans.items():
            if found is None:
                bench.note(f"Zorse Fig. 3, 8 V100 + 8 T4, {size}: PP + {name} is out of memory")
            else:
                said = tflops_of(planner, found[1].seconds)
                bench.row(
                    f"Zorse Fig. 3, 8 V100 + 8 T4, {size}: PP + {name}", said, "TFLOPS", against="paper: a figure"
                )


def gather_always(planner: Planner, choice: PipelineChoice, pipeline: SimulatedPipeline) -> SimulatedPipeline | None:
    """Return a pipeline with ZeRO-3: parameters are gathered for each micro-batch, once in its forward and once in its
    backward, beside the computation; None where two layers and shards do not fit on a device.
    """
    stages = []
    for s, stage in enumerate(pipeline.stages):
        gather, layers = sum(stage.gather_s), planner.layers[choice.cuts[s] : choice.cuts[s + 1]]
        largest = max(layer.parameters for layer in layers)
        devices = []
        for device in stage.devices:
            size = device.sizes[0]
            needed = size.states + largest * (2 * planner.model.parameter_bytes + planner.model.gradient_bytes)
            needed += len(device.microbatches) * size.activations + device.workspace_bytes
            if needed > planner.capacity(device.name):
                return None
            took = device.seconds[0]
            slowed = PassSeconds(max(took.f, gather), max(took.i + took.w, gather) - took.w, took.w)
            devices.append(replace(device, seconds=(slowed,)))
        stages.append(replace(stage, devices=tuple(devices), gather_s=()))
    return replace(pipeline, stages=tuple(stages))


def _largest(planners: Mapping[str, Planner], cluster: str) -> str | None:
    """Return the largest model of which a pipeline over the paper's groups fits."""
    for size, planner in reversed(list(planners.items())):
        for choice in _list_choices(planner, zorse_groups(planner.profile, cluster)):
            with suppress(ConfigError):
                planner.make_pipeline(choice)
                return size
    return None


def _compare_figure_8(bench: Bench) -> Curves:
    """Kinds are added to the slowest: throughput and utilisation of the largest model that fits on that alone."""
    x: list[str] = []
    y: list[float] = []
    for cluster in ("a", "b") if bench.quick else ZORSE:
        planners = {size: zorse_planner(cluster, size) for size in ZORSE[cluster]}
        kinds = planners["llama-7b"].profile.kinds
        order = sorted(kinds, key=lambda kind: kinds[kind].tflops)
        size = _largest({size: only_kinds(p, order[:1]) for size, p in planners.items()}, cluster)
        for count in range(1, len(order) + 1) if size is not None else ():
            planner = only_kinds(planners[size or ""], order[:count])
            found = play_best(planner, zorse_groups(planner.profile, cluster))
            if found is None:
                continue
            peak = sum(planner.profile.kind_of(d).tflops for d in planner.devices)
            tflops = tflops_of(planner, found[1].seconds)
            name = f"Zorse Fig. 8: {cluster}, {size}, {len(planner.devices)} devices up to {order[count - 1]}"
            bench.row(f"{name}: HFU", 100 * tflops / peak, "%", against="paper: stable or rising")
            x.append(f"{cluster} {len(planner.devices)}")
            y.append(tflops / 1e3)
    return Curves("Zorse Fig. 8: kinds added to the slowest", "cluster and devices", x, {"PFLOPS": y}, {})


def _compare_figure_9(bench: Bench) -> None:
    """Utilisation of each kind in its whole cluster, and alone with the same model."""
    for cluster in ("a",) if bench.quick else ZORSE:
        size = _largest({size: zorse_planner(cluster, size) for size in ZORSE[cluster]}, cluster)
        planner = zorse_planner(cluster, size or "llama-7b")
        together = play_best(planner, zorse_groups(planner.profile, cluster))
        if together is None:
            continue
        for kind, seconds in use_of_kinds(planner, together[0]).items():
            alone = only_kinds(planner, [kind])
            found = play_best(alone, zorse_groups(alone.profile, cluster))
            name = f"Zorse Fig. 9: {cluster}, {size}, {kind}: HFU"
            hfu = 100 * seconds / together[1].seconds
            if found is None:
                bench.row(name, hfu, "%", against="does not fit on these alone")
            else:
                own = 100 * use_of_kinds(alone, found[0])[kind] / found[1].seconds
                bench.row(name, hfu, "%", against="alone", of=own)


def _compare_figure_11(bench: Bench) -> Curves:
    """Llama 65B on cluster A: PP 5 × ZeRO-2 4; with offload (O); with ministages (I); with unequal groups (H)."""
    planner = zorse_planner("a", "llama-65b")
    uniform: Groups = tuple(map(tuple, cut_evenly(planner.devices, 5)))
    steps: dict[str, tuple[Groups, Accept]] = {
        "baseline": (
            uniform,
            lambda c: c.schedule is ScheduleName.BREADTH_FIRST and c.ministages == 1 and not c.offload,
        ),
        "+ O": (uniform, lambda c: c.ministages == 1 and c.offload),
        "+ O I": (uniform, lambda c: c.ministages > 1 and c.offload),
        "+ O I H": (zorse_groups(planner.profile, "a"), lambda c: c.ministages > 1 and c.offload),
    }
    said = {"baseline": "out of memory", "+ O": "fits", "+ O I": "26 % less memory", "+ O I H": "faster, more memory"}
    x: list[str] = []
    y: list[float] = []
    memory: list[float] = []
    for name, (groups, fits) in steps.items():
        found = play_best(planner, groups, fits)
        if found is None:
            bench.note(f"Zorse Fig. 11, {name}: out of memory (paper: {said[name]})")
            continue
        tflops = tflops_of(planner, found[1].seconds)
        used = max(peak / planner.capacity(d) for d, peak in found[1].peak_bytes.items())
        bench.row(f"Zorse Fig. 11, {name}: TFLOPS", tflops, "TFLOPS", against=f"paper: {said[name]}")
        bench.row(f"Zorse Fig. 11, {name}: memory of the fullest device", 100 * used, "%")
        x.append(name)
        y.append(tflops / 1e3)
        memory.append(used)
    return Curves("Zorse Fig. 11: Llama 65B on cluster A", "", x, {"PFLOPS": y, "memory of the fullest": memory}, {})
