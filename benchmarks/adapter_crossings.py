"""Which way of training is the fastest as the line between two sites slows down, and whether the plan knows it.

Two sites of two devices train a GPT-2, with lines of 10 Mbit/s to 10 Gbit/s. At each, `dips plan cluster` ranks
pipelines, FSDP2 (with HSDP and unequal shares), EDiT and two clusters under the outer loop on one scale. Here each is
computed a second time by other means: every pipeline that the planner can write is simulated, without bounds and
without a beam; the collectives of FSDP2 and EDiT are walked through layer by layer, one at a time on their line, where
the plan has closed forms. Near a crossing the two may differ; the bar is what the plan's first choice loses.

At four rates each is then run, by `Pipeline`, `fully_shard`, `MeshLoop` and a whole run of master, slave and agents,
between two network namespaces, with layers that sleep and that have real parameters and borders.

Chosen by rules that know nothing of what is run:

* The model is the one of GPT-2's four sizes for which a step computes for as long as its activations take over the line
  at the geometric mean of the rates (`choose_size`; the batch is SpanTrain's). Devices have a T4's speed, and memory
  for any of the ways, since memory is not what is compared.
* What is run is that model in other units: the same ratios of a step's seconds, bytes of parameters and bytes of a
  border, in steps of `STEP_S` of computation, on links a tenth as fast, in `LAYERS` equal layers.
* The rates are two on each side of the crossing from pipeline to FSDP2 that is computed, at 3,200 to 5,600 Mbit/s: the
  two above it, and those near a tenth and a quarter of it. A machine of two cores carries a tenth of these.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise, repeat
from math import inf, log, sqrt
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Bench
from benchmarks.line_program import LineProgram, ask_programs, open_programs
from benchmarks.lone_slave import equal_layers
from benchmarks.namespaces import End, missing, network, slowed
from benchmarks.whole_run import SITE, WholeRun
from dips.errors import ConfigError
from dips.inside.planning.group import list_groupings
from dips.inside.planning.profile import ClusterProfile, ModelProfile, parse_model, parse_profile, ring_seconds
from dips.inside.planning.search import Planner, RankedPlan, describe_choice
from dips.inside.planning.simulate import PassSeconds, StalledPipeline, simulate

MBITS = (10, 18, 32, 56, 100, 180, 320, 560, 1000, 1800, 3200, 5600, 10_000)
LOST = 0.15  # of the fastest, beside a crossing
LATENCY_US = 1000.0
TAU, INNER_STEPS = 128, 64  # as `dips plan cluster` has them
SAME = ("pipeline", "FSDP2")  # steps of one device; the others learn otherwise, and only tokens are compared
SIZES = {"small": (12, 768), "medium": (24, 1024), "large": (36, 1280), "xl": (48, 1600)}  # blocks, hidden


def measure_crossings(bench: Bench) -> None:
    """The plan's first choice at each rate against the fastest, as computed and as run."""
    size, mbits = choose_size(), MBITS[:: 3 if bench.quick else 1]
    judged = Judged()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for mbit, (ranked, found) in zip(mbits, pool.map(compute_each, mbits, repeat(size)), strict=True):
            shown = ", ".join(f"{way} {seconds:.3g} s" for way, seconds in found.items())
            bench.say(f"{mbit} Mbit/s: {judged.add(ranked, found)}; {shown}")
    judged.tell(bench, "computed", mbits)
    bench.note(f"computed: GPT-2 {size}, two sites of two devices of a T4's speed")
    run_ways(bench, size)


class Judged:
    """What the plan's first choice loses at each rate, of all ways and of those whose steps are one device's."""

    def __init__(self) -> None:
        self._lost: dict[str, list[float]] = {"all four": [], "pipeline and FSDP2": []}
        self._ways: dict[str, list[str]] = {key: [] for key in self._lost}

    def add(self, ranked: Sequence[RankedPlan], found: Mapping[str, float]) -> str:
        """Add a rate's ranking and the seconds that each way takes; return what was chosen."""
        for key, among in (("all four", tuple(found)), ("pipeline and FSDP2", SAME)):
            chosen = next(way for plan in ranked if (way := name_way(plan)) in among)
            self._lost[key].append(found[chosen] / min(found[way] for way in among) - 1)
            self._ways[key].append(chosen)
        return " or ".join(ways[-1] for ways in self._ways.values())

    def tell(self, bench: Bench, how: str, mbits: Sequence[float]) -> None:
        """Add the rows."""
        for key, lost in self._lost.items():
            ways = self._ways[key]
            crossings = sum(a != b for a, b in pairwise(ways))
            name = f"{how}, of {key}: the plan's way over the fastest, at worst"
            bench.row(name, 1 + max(lost), "×", against="a crossing", of=1 + LOST, least=1.0, less=True)
            bench.row(f"{how}, of {key}: rates at which it is the fastest", sum(l <= 0 for l in lost), "")
            bench.note(
                f"{how}, of {key}: {' '.join(ways)} from {mbits[0]:g} to {mbits[-1]:g} Mbit/s, {crossings} crossings"
            )


def choose_size() -> str:
    """Return the size of GPT-2 whose step computes for as long as its activations take over the line."""

    def unbalance(size: str) -> float:
        planner = Planner(*make_cluster(sqrt(MBITS[0] * MBITS[-1]), size))
        return abs(log(step_seconds(planner) / (border_bytes(planner) * line_of(planner))))

    return min(SIZES, key=unbalance)


def step_seconds(planner: Planner) -> float:
    """Return the seconds of a step's computation, shared by all devices."""
    return sum(t.total_s for t in planner.layer_times(KIND, planner.model.batch // len(planner.devices)))


def border_bytes(planner: Planner) -> float:
    """Return the bytes of a step's activations between two blocks."""
    return planner.model.batch * planner.layers[0].border_bytes


def line_of(planner: Planner) -> float:
    """Return the seconds per byte of the line between the sites."""
    return planner.profile.route(planner.devices[0], planner.devices[-1]).byte_s


KIND = "device"


def make_cluster(mbit: float, size: str) -> tuple[ClusterProfile, ModelProfile]:
    """Return two sites of two devices with this line between them, and a GPT-2."""
    blocks, hidden = SIZES[size]
    shape = {"blocks": blocks, "hidden": hidden, "ffn": 4 * hidden, "vocab": 50257, "gated": False}
    model = {"name": f"gpt-2-{size}", "batch": 128, "sequence": 1024, "transformer": shape}
    kind = {"memory_gb": 80, "tflops": 65, "inside_gbit": 64}
    return _parse_profile(mbit, LATENCY_US, kind, {}), parse_model(model, "model")


def _parse_profile(
    mbit: float, latency_us: float, kind: Mapping[str, Any], measured: Mapping[str, Any]
) -> ClusterProfile:
    line = {"gbit": mbit / 1000, "latency_us": latency_us}
    profile = {
        "nodes": [{"name": site, "kind": KIND, "devices": 2, "site": site} for site in ("east", "west")],
        "kinds": {KIND: kind},
        "links": {"east": {"west": line}, "west": {"east": line}},
        "measured": {KIND: measured},
    }
    return parse_profile(profile, "profile")


def name_way(plan: RankedPlan) -> str:
    """Return the way of training that a plan is."""
    if plan.choice is not None:
        return "pipeline" if len(plan.choice.groups) > 1 else "FSDP2"
    return "FSDP2" if plan.exact else "EDiT" if "EDiT" in plan.name else "clusters"


# ---- run -------------------------------------------------------------------------------------------------------------

STEP_S, LAYERS, BATCH = 2.0, 8, 32  # computation of a step, slept; of the whole model
START_S = 0.01  # of a pass over a layer, whatever the number of samples
SLOWER = 10.0  # than the links that are computed; bytes are fewer by as much, beside seconds
RUN_MBITS = tuple(mbit / SLOWER for mbit in (320, 1000, 5600, 10_000))
ROUNDS = 3
RANKS, SITES = 4, ("east", "west")
RUN_KIND = {"memory_gb": 80, "tflops": 1, "inside_gbit": 8, "inside_us": 200}  # gloo inside a namespace
RUN_LATENCY_US = 500.0
WITHIN_S, POLL_S = 120.0, 0.05
LOOPBACK = "127.9.0"  # daemons that speak plain text take no other addresses


def run_ways(bench: Bench, size: str) -> None:
    """The plan's first choice at some rates against the fastest, all of them run."""
    if lacks := missing():
        bench.note(f"nothing was run: {lacks}")
        return
    mbits = RUN_MBITS[1::2] if bench.quick else RUN_MBITS
    planners = {mbit: Planner(*make_slept(mbit, size)) for mbit in mbits}
    layer = planners[mbits[0]].layers[0]
    pushes = time_pushes(mbits, int(layer.parameters))
    judged = Judged()
    with open_sites() as (hosts, ranks):
        ask_programs(ranks, "make", LAYERS, int(layer.parameters), _pass_lines())
        for way in ("FSDP2", "HSDP", "site", *["EDiT"] * EDIT_STEPS):  # connections and buffers, at the full rate
            take_step(ranks, way)
        for mbit, planner in planners.items():
            ranked = planner.search(lambda choice: not choice.offload).ranked
            with slow_line(hosts, mbit):
                found, shown = run_each(ranks, planner, ranked, pushes[mbit], 1 if bench.quick else ROUNDS)
            bench.say(f"{mbit:g} Mbit/s: {judged.add(ranked, found)}; {shown}")
            bench.note(f"run at {mbit:g} Mbit/s: {shown}")
    judged.tell(bench, "run", mbits)
    parameters, border = 4e-6 * LAYERS * layer.parameters, 1e-6 * BATCH * layer.border_bytes
    bench.note(
        f"run: that model in other units, {LAYERS} layers, {STEP_S:g} s slept, {parameters:.3g} MB of parameters, "
        f"{border:.3g} MB over a border; predicted seconds in brackets. EDiT: one step in {TAU} has the sync. "
        f"Clusters: of a whole run the push and pull over the line, once in {INNER_STEPS} steps of a site, which "
        f"trains meanwhile; load of the machine {os.getloadavg()[0]:.1f}"
    )


def make_slept(mbit: float, size: str) -> tuple[ClusterProfile, ModelProfile]:
    """Return the sites with this line and the model in other units, whose layers are slept; parameters are fp32."""
    whole = Planner(*make_cluster(MBITS[0], size))
    fewer = SLOWER * step_seconds(whole) / STEP_S
    numel = whole.model.parameters * whole.model.parameter_bytes / 4 / fewer / LAYERS
    floats = border_bytes(whole) / 4 / fewer / BATCH
    layer = {
        "name": "layer", "parameters": RANKS * round(numel / RANKS), "flops": 1.0,
        "activation_bytes": 4.0 * round(floats), "border_bytes": 4.0 * round(floats), "repeat": LAYERS,
    }  # fmt: skip
    model = {
        "name": f"slept gpt-2-{size}", "batch": BATCH, "recompute": False, "parameter_bytes": 4, "gradient_bytes": 4,
        "layers": [layer],
    }  # fmt: skip
    took = dict(zip(("forward", "input", "weight"), _pass_lines(), strict=True))
    return _parse_profile(mbit, RUN_LATENCY_US, RUN_KIND, {"layer": took}), parse_model(model, "model")


def _pass_lines() -> list[tuple[float, float]]:
    """Return seconds per sample and of any micro-batch of F, I and W; I has the forward that is computed again."""
    forward_s = STEP_S / LAYERS / 4
    slope = (forward_s - START_S) / (BATCH / RANKS)
    return [(slope, START_S), (2 * slope, 2 * START_S), (slope, START_S)]


@contextmanager
def open_sites() -> Iterator[tuple[Sequence[End], Sequence[LineProgram]]]:
    """Yield both sites, and the ranks: two in each."""
    with TemporaryDirectory() as directory, open_hosts("10.231.12") as hosts, open_programs() as start:
        words = [("crossing_rank", str(i), str(RANKS), f"{directory}/store") for i in range(RANKS)]
        with ThreadPoolExecutor(RANKS) as pool:  # each answers when all have come
            ranks = list(pool.map(lambda i: start(hosts[i * 2 // RANKS], *words[i]), range(RANKS)))
        yield hosts, ranks


@contextmanager
def open_hosts(subnet: str) -> Iterator[Sequence[End]]:
    with network(dict.fromkeys(SITES, max(RUN_MBITS)), subnet) as hosts:
        yield list(hosts.values())


@contextmanager
def slow_line(hosts: Sequence[End], mbit: float) -> Iterator[None]:
    with ExitStack() as stack:
        for host in hosts:
            stack.enter_context(slowed(host, mbit / max(RUN_MBITS)))
        yield


def take_step(ranks: Sequence[LineProgram], way: str) -> float:
    """Return the seconds of a step, from the first begin to the last end."""
    begins, ends = zip(*ask_programs(ranks, way, BATCH // RANKS), strict=True)
    return max(ends) - min(begins)


MOST_SLOWER = 1.5  # than HSDP: FSDP2 over the line, which moves more, is run below that
EDIT_STEPS = 3  # in which one carries a sync out, one has none, and one begins the next


def run_each(
    ranks: Sequence[LineProgram], planner: Planner, ranked: Sequence[RankedPlan], push_s: float, rounds: int
) -> tuple[dict[str, float], str]:
    """Return the seconds of a step in each way, and the same beside what the plan predicts."""
    from benchmarks.pipeline_rank import spell_plan

    choice, played = planner.finish(next(p.choice for p in ranked if name_way(p) == "pipeline" and p.choice))
    plan = spell_plan(planner.make_pipeline(choice), played, choice.cuts, choice.samples)
    ask_programs(ranks, "plan", plan, int(planner.layers[0].border_bytes / 4))
    wanted = {way: min(p.step_s for p in ranked if name_way(p) == way) for way in ("pipeline", "EDiT", "clusters")}
    wanted |= {name: next(p.step_s for p in ranked if p.name.startswith(name)) for name in ("HSDP", "FSDP2")}
    alike = wanted["FSDP2"] < MOST_SLOWER * wanted["HSDP"]
    turn = ["pipeline", "HSDP", *(["FSDP2"] if alike else []), "site", *["EDiT"] * EDIT_STEPS]
    turns = [[take_step(ranks, way) for way in turn] for _ in range(rounds)]  # so that a slow minute slows all
    took = {way: median(each) for way, each in zip(turn, zip(*turns, strict=True), strict=True) if way != "EDiT"}
    edit = [seconds[-EDIT_STEPS:] for seconds in turns]
    plain = median(steps[1] for steps in edit)
    took["EDiT"] = plain + max(0.0, median(map(sum, edit)) - EDIT_STEPS * plain) / TAU
    took["clusters"] = max(took.pop("site"), push_s / INNER_STEPS)
    shown = ", ".join(f"{way} {seconds:.3g} s ({wanted[way]:.3g})" for way, seconds in took.items())
    took["FSDP2"] = min(took.get("FSDP2", inf), took.pop("HSDP"))
    return took, f"{shown}; {describe_choice(choice)}, a push and pull {push_s:.3g} s"


def time_pushes(mbits: Sequence[float], numel: int) -> dict[float, float]:
    """Return the seconds of a push and a pull over the line at each rate, in a run whose master and slave are at the
    other site.

    numel   parameters of a layer
    """
    found = {}
    with TemporaryDirectory(prefix="dips-bench-") as made, open_hosts(LOOPBACK) as hosts:
        places = {"c0": hosts[0], "c1": hosts[1], SITE: hosts[1]}
        manifest = equal_layers(LAYERS * numel, LAYERS)
        with WholeRun(Path(made) / "run", manifest, clusters=2, slaves=1, versions=10_000, hosts=places) as run:
            for mbit in mbits:
                with slow_line(hosts, mbit):
                    found[mbit] = _wait_round(run.meeting / "c0.jsonl", time.time())
    return found


def _wait_round(lines: Path, after: float) -> float:
    """Return the seconds of the first whole round that began after a time."""
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        for line in lines.read_text().splitlines() if lines.exists() else ():
            step = json.loads(line)
            if step["begun"] > after:
                return float(step["ended"] - step["begun"])
        time.sleep(POLL_S)
    raise RuntimeError(f"no round within {WITHIN_S:g} s")


# ---- by other means --------------------------------------------------------------------------------------------------


def compute_each(mbit: float, size: str) -> tuple[list[RankedPlan], dict[str, float]]:
    """Return the plan's ranking at a rate, and the seconds of a step in each way."""
    planner = Planner(*make_cluster(mbit, size))
    found = {
        "pipeline": try_pipelines(planner),
        "FSDP2": walk_fsdp2(planner),
        "EDiT": walk_edit(planner),
        "clusters": count_clusters(planner),
    }
    return planner.search().ranked, found


def try_pipelines(planner: Planner) -> float:
    """Return the seconds of the fastest pipeline, of all that can be written on all groupings; where there is room for
    everything, none is faster for putting some of it into host memory.
    """
    best = inf
    for choice in planner.list_choices(list_groupings(planner.profile, planner.speed_of)):
        if len(choice.groups) > 1 and not choice.offload:
            try:
                best = min(best, simulate(planner.make_pipeline(choice), spans=False).seconds)
            except (ConfigError, StalledPipeline):
                continue
    return best


def walk_fsdp2(planner: Planner) -> float:
    """Return the seconds of FSDP2 over all devices, or sharded in the sites with gradients averaged between them."""
    model, devices = planner.model, planner.devices
    n = len(devices)
    ring = planner.profile.ring(devices)
    gathers = [ring_seconds(ring, n, l.parameters * model.parameter_bytes) for l in planner.layers]
    reduces = [ring_seconds(ring, n, l.parameters * model.gradient_bytes) for l in planner.layers]
    times = planner.layer_times(KIND, model.batch // n)
    sites = [[d for d in devices if planner.profile.places[d].site == site] for site in ("east", "west")]
    between = planner.profile.ring([site[0] for site in sites])
    own, scattered = _inside(planner, sites[0])
    averaged = [
        r + 2 * ring_seconds(between, len(sites), l.parameters * model.gradient_bytes)
        for r, l in zip(scattered, planner.layers, strict=True)
    ]
    return min(walk_step(times, gathers, reduces), walk_step(times, own, averaged))


def walk_edit(planner: Planner) -> float:
    """Return the mean seconds of EDiT's steps: sharded in each site, averaged in the forward of each TAU-th step."""
    sites = [planner.devices[:2], planner.devices[2:]]
    between = planner.profile.ring([site[0] for site in sites])
    gathers, reduces = _inside(planner, sites[0])
    times = planner.layer_times(KIND, planner.model.batch // len(planner.devices))
    nbytes = planner.model.parameter_bytes
    syncs = [2 * ring_seconds(between, len(sites), l.parameters * nbytes) for l in planner.layers]
    plain = walk_step(times, gathers, reduces)
    return plain + (walk_step(times, gathers, reduces, syncs) - plain) / TAU


def count_clusters(planner: Planner) -> float:
    """Return the mean seconds of a step of two clusters that push and pull meanwhile, each the whole model in fp32."""
    site = Planner(planner.profile.only(planner.devices[:2]), replace(planner.model, batch=planner.model.batch // 2))
    gathers, reduces = _inside(site, site.devices)
    step_s = walk_step(site.layer_times(KIND, site.model.batch // 2), gathers, reduces)
    route = planner.profile.route(planner.devices[0], planner.devices[-1])
    moved_s = route.latency_s + 4 * planner.model.parameters * route.byte_s
    return max(step_s, 2 * moved_s / INNER_STEPS)


def _inside(planner: Planner, devices: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return the seconds of each layer's gather and reduction among the devices of a site."""
    ring, n, model = planner.profile.ring(devices), len(devices), planner.model
    return (
        [ring_seconds(ring, n, l.parameters * model.parameter_bytes) for l in planner.layers],
        [ring_seconds(ring, n, l.parameters * model.gradient_bytes) for l in planner.layers],
    )


def walk_step(
    times: Sequence[PassSeconds], gathers: Sequence[float], reduces: Sequence[float], syncs: Sequence[float] = ()
) -> float:
    """Return the seconds of a step of FSDP2, action by action.

    A layer is gathered while the one before it is computed; collectives go one at a time, in the order in which they
    are asked for. With `syncs` each layer is averaged before its gather, on a line of its own, one after the other.
    """
    line = computed = begun = synced = 0.0
    for i, took in enumerate(times):
        synced += syncs[i] if syncs else 0.0
        line = max(line, begun, synced) + gathers[i]
        begun = max(computed, line)
        computed = begun + took.f
    gathered = computed  # the last layer is still there
    for i in reversed(range(len(times))):
        begun = max(computed, gathered)
        computed = begun + times[i].i + times[i].w
        if i:
            gathered = line = max(line, begun) + gathers[i - 1]
        line = max(line, computed) + reduces[i]
    return max(line, computed)
