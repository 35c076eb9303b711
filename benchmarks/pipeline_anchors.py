"""Planned pipelines beside torch's own schedules: `pipeline --part setting1` and `--part looped`.

Layers are slept, transfers and collectives are real. Ranks are benchmarks/pipeline_anchors_rank.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.harness import Bench
from benchmarks.line_program import LineProgram, open_programs
from benchmarks.namespaces import End, missing, network
from benchmarks.planning import read_inventory
from benchmarks.planning_papers import find_crossing
from dips.inside.planning.profile import GBIT_BYTES, parse_model, parse_profile
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.search import PipelineChoice, Planner
from dips.inside.planning.simulate import (
    PassSeconds,
    PipelineDevice,
    PipelineStage,
    Prediction,
    Route,
    SimulatedPipeline,
    simulate,
)

if TYPE_CHECKING:
    from benchmarks.pipeline_anchors_rank import SleptJob

ROW_BYTES = 32

# ---- SpanTrain's setting 1 -------------------------------------------------------------------------------------------

SITES = {"cloud": 82.58, "edge": 71.16, "end": 59.54}  # S Table 2: TFLOP/s of RTX4090, RTX3090, RTX3080 in FP16
LINK_MBIT = {"cloud": 100.0, "edge": 1000.0, "end": 1000.0}  # S§4.1, setting 1; of each site's own link
PACKET = 1448 / 1514  # of a packet's bytes that are not headers
LATENCY_US = 500.0
LAYERS, MICROBATCHES, SAMPLES, LAYER_S = 7, 4, 6, 0.1  # seconds of a pass of a layer over a micro-batch, in the cloud
BORDERS = (0.1, 0.25, 0.5, 1.0, 2.0)  # seconds of a transfer over the slow border, by those of a stage's forward
SHARDED = 8  # samples of a micro-batch of GPT-2 beside whose border a block's parameters stand
NEAR, NO_SLOWER = 0.1, 1.03
PUBLISHED = {"FSDP2": 1.9, "GPipe": 1.13}  # S§4.2, setting 1: × as fast as these
SCHEDULES = {  # torch's, by that of the simulator
    "GPipe": ScheduleName.GPIPE,
    "1F1B": ScheduleName.ONE_F_ONE_B,
    "InterleavedZeroBubble": ScheduleName.ZB_H1,
}


def compare_sites(bench: Bench) -> None:
    """Our plan at five widths of the border: beside the simulator, and beside the best of torch's with its cuts."""
    if reason := missing():
        raise SystemExit(f"pipeline --part setting1: {reason}")
    borders = BORDERS[1:4:2] if bench.quick else BORDERS
    steps = 1 if bench.quick else 2
    measured: dict[str, list[float]] = {name: [] for name in ("plan", *SCHEDULES, "FSDP2")}
    predicted: dict[str, list[float]] = {name: [] for name in measured}
    with network(LINK_MBIT, "10.231.13") as hosts, open_ranks(list(hosts.values()), "w0") as ranks:
        for border in borders:
            planner = plan_sites(border)
            choice, seconds = choose_plan(planner)
            for name, wanted in seconds.items():
                # A step of FSDP2 takes half a minute on the slowest border.
                took, _ = play_steps(ranks, name, make_sites_jobs(planner, choice), 1 if name == "FSDP2" else steps)
                measured[name].append(took)
                predicted[name].append(wanted)
                bench.say(f"border of {border:g} forwards, {name}: {took:.2f} s, simulated {wanted:.2f}")
    near = sum(abs(took / wanted - 1) <= NEAR for took, wanted in zip(measured["plan"], predicted["plan"], strict=True))
    bench.row(
        "setting 1: points within 10 % of the simulator", near, "", against="all", of=float(len(borders)), least=1
    )
    for at, border in enumerate(borders):
        best = min((name for name in measured if name != "plan"), key=lambda name: measured[name][at])
        name, own, theirs = f"setting 1, border of {border:g} forwards", measured["plan"][at], measured[best][at]
        bench.row(name, own, "s", against="the best of torch's", of=theirs, least=1 / NO_SLOWER, less=True)
        bench.note(f"{name}: the best of torch's is {best}")
        bench.row(f"{name}: FSDP2", measured["FSDP2"][at], "s", against="the plan", of=own)
    for name, gain in PUBLISHED.items():
        gains = {
            kind: [theirs / own for theirs, own in zip(of[name], of["plan"], strict=True)]
            for kind, of in (("simulated", predicted), ("measured", measured))
        }
        shown = {kind: find_crossing(borders, of, gain) for kind, of in gains.items()}
        for kind, where in shown.items():
            if where is None:
                least, most = min(gains[kind]), max(gains[kind])
                bench.note(f"{kind}: {name} takes {least:.2f} to {most:.2f} × our seconds; the paper's is {gain}")
            else:
                bench.row(f"setting 1, {kind}: {name} takes {gain} × our seconds at a border of", where, "forwards")
    bench.note(
        f"three sites of speeds {', '.join(f'{v:g}' for v in SITES.values())}, {LAYERS} layers of {LAYER_S:g} s and "
        f"more a pass, {MICROBATCHES} micro-batches; cuts {list(choice.cuts)}; FSDP2 has equal shares, and blocks as "
        f"large beside a border as GPT-2's with {SHARDED} samples"
    )


def plan_sites(border: float) -> Planner:
    """Return the planner whose slow border takes so many forwards of a stage."""
    sites = list(SITES)
    forward_s = LAYERS * LAYER_S / len(SITES)
    rate = LINK_MBIT["cloud"] / 1000 * PACKET * GBIT_BYTES
    rows = max(1, round(border * forward_s * rate / ROW_BYTES / SAMPLES))
    gpt = parse_model(read_inventory("gpt-2"), "gpt-2")
    block = next(layer for layer in gpt.chain if layer.name == "block")
    ratio = block.parameters * gpt.parameter_bytes / (SHARDED * block.border_bytes)
    nbytes = float(ROW_BYTES * rows)
    profile = parse_profile(
        {
            "nodes": [{"name": name, "kind": name, "site": name} for name in sites],
            "kinds": {name: {"memory_gb": 1000, "tflops": speed} for name, speed in SITES.items()},
            "links": {
                a: {
                    b: {"gbit": min(LINK_MBIT[a], LINK_MBIT[b]) / 1000 * PACKET, "latency_us": LATENCY_US}
                    for b in sites
                }
                for a in sites
            },
            "measured": {
                name: {
                    "block": {
                        way: [LAYER_S / SAMPLES * SITES["cloud"] / speed, 0.0] for way in ("forward", "input", "weight")
                    }
                }
                for name, speed in SITES.items()
            },
        },
        "setting 1",
    )
    layers = [
        {
            "name": "block", "parameters": ratio * nbytes * SAMPLES / 4, "flops": 1.0, "activation_bytes": nbytes,
            "border_bytes": nbytes, "repeat": LAYERS,
        }
    ]  # fmt: skip
    made = {"name": "setting 1", "batch": MICROBATCHES * SAMPLES, "recompute": False, "layers": layers}
    floats = {"parameter_bytes": 4.0, "gradient_bytes": 4.0}
    return Planner(profile, parse_model({**made, **floats}, "setting 1"))


def choose_plan(planner: Planner) -> tuple[PipelineChoice, dict[str, float]]:
    """Return the best plan of the sites in their order, and the simulated seconds of it and of torch's."""
    groups = tuple((device,) for device in planner.devices)
    cuts = planner.cut_layers(groups, 1, SAMPLES)
    assert cuts is not None
    same = PipelineChoice(ScheduleName.COMPACT_ZB, groups, cuts, SAMPLES)
    ours = [
        planner.finish(replace(same, schedule=name)) for name in (ScheduleName.COMPACT_ZB, ScheduleName.BREADTH_FIRST)
    ]
    choice, prediction = min(ours, key=lambda made: made[1].seconds)
    seconds = {"plan": prediction.seconds}
    for name, schedule in SCHEDULES.items():
        seconds[name] = simulate(planner.make_pipeline(replace(same, schedule=schedule)), spans=False).seconds
    seconds["FSDP2"] = planner.shard_fully(planner.devices, equal=True).step_s
    return choice, seconds


def make_sites_jobs(planner: Planner, choice: PipelineChoice) -> list[SleptJob]:
    """Return the job of each site's rank."""
    from benchmarks.pipeline_anchors_rank import SleptJob
    from benchmarks.pipeline_rank import spell_plan

    pipeline = planner.make_pipeline(choice)
    plan = spell_plan(pipeline, simulate(pipeline), choice.cuts, SAMPLES)
    layer = planner.layers[0]
    return [
        SleptJob(
            plan=plan,
            device=device,
            seconds=[list(astuple(took)) for took in planner.layer_times(planner.profile.places[device].kind, SAMPLES)],
            cuts=list(choice.cuts),
            ministages=1,
            samples=SAMPLES,
            microbatches=MICROBATCHES,
            rows=round(layer.border_bytes / ROW_BYTES),
            weights=round(layer.parameters * 4 / ROW_BYTES),
        )
        for device in planner.devices
    ]


# ---- torch's ScheduleLoopedBFS ---------------------------------------------------------------------------------------

STAGES, REPLICAS, BLOCKS, BLOCK_S, BLOCK_ROWS = 2, 2, 16, 0.05, 4096
GROUPED = 4  # micro-batches
COUNTS = (1, 2, 4, 8)  # ministages


def compare_looped(bench: Bench) -> None:
    """Stages of equally many devices, which torch can run by itself: seconds and gathered bytes of both."""
    lone = [End("", "127.0.0.1")] * (STAGES * REPLICAS)
    with open_ranks(lone, "lo") as ranks:
        for count in COUNTS[1:3] if bench.quick else COUNTS:
            pipeline, played = group_equally(count)
            jobs, found = make_looped_jobs(pipeline, played, count), {}
            for name in ("plan", "LoopedBFS"):
                found[name] = play_steps(ranks, name, jobs, 1 if bench.quick else 2)
                bench.say(f"{count} ministages, {name}: {found[name][0]:.2f} s, simulated {played.seconds:.2f}")
            (own_s, own_bytes), (their_s, their_bytes) = found.values()
            name = f"equal groups, {count} ministage{'s' if count > 1 else ''}"
            bench.row(f"{name}: a step", own_s, "s", against="torch's LoopedBFS", of=their_s, less=True)
            bench.row(
                f"{name}: gathered", own_bytes, "B", against="torch's LoopedBFS", of=their_bytes, least=1.0, less=True
            )
    bench.note(
        f"{STAGES} stages of {REPLICAS} ranks, {BLOCKS} layers of {BLOCK_S:g} s a pass, {GROUPED} micro-batches; the "
        "most bytes of whole parameters on a rank, buffers of all-gathers included"
    )


def group_equally(ministages: int) -> tuple[SimulatedPipeline, Prediction]:
    """Return the breadth-first pipeline over equal groups."""
    took = PassSeconds(*[BLOCK_S * BLOCKS / STAGES / ministages] * 3)
    collective = (0.001,) * ministages
    stages = tuple(
        PipelineStage(
            tuple(
                PipelineDevice(f"s{s}d{i}", tuple(range(i, GROUPED, REPLICAS)), (took,) * ministages)
                for i in range(REPLICAS)
            ),
            collective,
            collective,
        )
        for s in range(STAGES)
    )
    pipeline = SimulatedPipeline(
        ScheduleName.BREADTH_FIRST,
        stages,
        (1.0,) * (STAGES * ministages - 1),
        lambda _, __: Route(0.001, ()),
        ministages,
        keep=ministages == 1,
    )
    return pipeline, simulate(pipeline)


def make_looped_jobs(pipeline: SimulatedPipeline, played: Prediction, ministages: int) -> list[SleptJob]:
    """Return the job of each rank."""
    from benchmarks.pipeline_anchors_rank import SleptJob
    from benchmarks.pipeline_rank import spell_plan

    cuts = list(range(0, BLOCKS + 1, BLOCKS // (STAGES * ministages)))
    plan = spell_plan(pipeline, played, cuts, 1)
    return [
        SleptJob(plan, device.name, [[BLOCK_S] * 3] * BLOCKS, cuts, ministages, 1, GROUPED, 1, BLOCK_ROWS)
        for stage in pipeline.stages
        for device in stage.devices
    ]


# ---- ranks -----------------------------------------------------------------------------------------------------------


@contextmanager
def open_ranks(ends: Sequence[End], interface: str) -> Iterator[list[LineProgram]]:
    """Start a rank in each place."""
    with TemporaryDirectory() as directory, open_programs() as start:
        rest = (str(len(ends)), f"{directory}/store", interface)
        with ThreadPoolExecutor(len(ends)) as pool:  # each answers when all have come
            ranks = list(pool.map(lambda i: start(ends[i], "pipeline_anchors_rank", str(i), *rest), range(len(ends))))
        yield ranks


def play_steps(ranks: Sequence[LineProgram], way: str, jobs: Sequence[SleptJob], steps: int) -> tuple[float, int]:
    """Return the median seconds of a step, from the first rank's begin to the last one's end, and the most bytes of
    gathered parameters. A step before makes connections and buffers, and torch then gathers everything to find shapes.
    """
    for rank, job in zip(ranks, jobs, strict=True):
        rank.send_request("begin", way, asdict(job))
    for rank in ranks:
        rank.read_answer()
    took, most = list[float](), 0
    for _ in range(steps + 1):
        for rank in ranks:
            rank.send_request("step")
        begins, ends, gathered = zip(*(rank.read_answer() for rank in ranks), strict=True)
        took.append(max(ends) - min(begins))
        most = max(gathered)
    return median(took[1:]), most
