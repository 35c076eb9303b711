"""Which way of training is the fastest as the line between two sites slows down, and whether the plan knows it.

Two sites of two T4s train a GPT-2 of a small vocabulary, with lines of 10 Mbit/s to 10 Gbit/s. At each, `dips plan
cluster` ranks pipelines, FSDP2 (with HSDP and unequal shares), EDiT and two clusters under the outer loop on one scale.
Here each is computed a second time by other means: every pipeline that the planner can write is simulated, without
bounds and without a beam; the collectives of FSDP2 and EDiT are walked through layer by layer, one at a time on their
line, where the plan has closed forms. Near a crossing the two may differ; the bar is what the plan's first choice
loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from benchmarks.harness import Bench
from dips.errors import ConfigError
from dips.inside.planning.group import list_groupings
from dips.inside.planning.profile import ClusterProfile, ModelProfile, parse_model, parse_profile, ring_seconds
from dips.inside.planning.search import Planner, RankedPlan
from dips.inside.planning.simulate import PassSeconds, StalledPipeline, simulate

MBITS = (10, 18, 32, 56, 100, 180, 320, 560, 1000, 1800, 3200, 5600, 10_000)
LOST = 0.15  # of the fastest, beside a crossing
LATENCY_US = 1000.0
TAU, INNER_STEPS = 128, 64  # as `dips plan cluster` has them
SAME = ("pipeline", "FSDP2")  # steps of one device; the others learn otherwise, and only tokens are compared


def measure_crossings(bench: Bench) -> None:
    """The plan's first choice at each rate against the fastest, of all and of those whose steps are one device's."""
    lost: dict[str, list[float]] = {"all": [], "same": []}
    ways: dict[str, list[str]] = {"all": [], "same": []}
    for mbit in MBITS[:: 3 if bench.quick else 1]:
        profile, model = make_cluster(mbit)
        planner = Planner(profile, model)
        ranked = planner.search().ranked
        found = {
            "pipeline": try_pipelines(planner),
            "FSDP2": walk_fsdp2(planner),
            "EDiT": walk_edit(planner),
            "clusters": count_clusters(planner),
        }
        for key, among in (("all", tuple(found)), ("same", SAME)):
            chosen = next(way for plan in ranked if (way := name_way(plan)) in among)
            lost[key].append(found[chosen] / min(found[way] for way in among) - 1)
            ways[key].append(chosen)
        shown = ", ".join(f"{way} {seconds:.3g} s" for way, seconds in found.items())
        bench.say(f"{mbit} Mbit/s: {ways['all'][-1]}, with steps of one device {ways['same'][-1]}; {shown}")
    for key, of in (("all", "all four"), ("same", "pipeline and FSDP2")):
        crossings = sum(a != b for a, b in zip(ways[key], ways[key][1:], strict=False))
        name = f"of {of}: the plan's way over the fastest, at worst"
        bench.row(name, 1 + max(lost[key]), "×", against="a crossing", of=1 + LOST, least=1.0, less=True)
        bench.row(f"of {of}: rates at which it is the fastest", sum(l <= 0 for l in lost[key]), "")
        bench.note(f"of {of}: {' '.join(ways[key])} from {MBITS[0]} to {MBITS[-1]} Mbit/s, {crossings} crossings")


def make_cluster(mbit: float) -> tuple[ClusterProfile, ModelProfile]:
    """Return two sites of two T4s with this line between them, and a GPT-2 with a vocabulary of 8,192."""
    line = {"gbit": mbit / 1000, "latency_us": LATENCY_US}
    profile = {
        "nodes": [{"name": site, "kind": "T4", "devices": 2, "site": site} for site in ("east", "west")],
        "kinds": {"T4": {"memory_gb": 16, "tflops": 65, "inside_gbit": 64}},
        "links": {"east": {"west": line}, "west": {"east": line}},
    }
    shape = {"blocks": 12, "hidden": 768, "ffn": 3072, "vocab": 8192, "gated": False}
    model = {"name": "gpt-2", "batch": 128, "sequence": 512, "recompute": False, "transformer": shape}
    return parse_profile(profile, "profile"), parse_model(model, "model")


def name_way(plan: RankedPlan) -> str:
    """Return the way of training that a plan is."""
    if plan.choice is not None:
        return "pipeline" if len(plan.choice.groups) > 1 else "FSDP2"
    return "FSDP2" if plan.exact else "EDiT" if "EDiT" in plan.name else "clusters"


# ---- by other means --------------------------------------------------------------------------------------------------


def try_pipelines(planner: Planner) -> float:
    """Return the seconds of the fastest pipeline, of all that can be written on all groupings."""
    best = inf
    for choice in planner.list_choices(list_groupings(planner.profile, planner.speed_of)):
        if len(choice.groups) > 1:
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
    times = planner.layer_times("T4", model.batch // n)
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
    times = planner.layer_times("T4", planner.model.batch // len(planner.devices))
    nbytes = planner.model.parameter_bytes
    syncs = [2 * ring_seconds(between, len(sites), l.parameters * nbytes) for l in planner.layers]
    plain = walk_step(times, gathers, reduces)
    return plain + (walk_step(times, gathers, reduces, syncs) - plain) / TAU


def count_clusters(planner: Planner) -> float:
    """Return the mean seconds of a step of two clusters that push and pull meanwhile, each the whole model in fp32."""
    site = Planner(planner.profile.only(planner.devices[:2]), replace(planner.model, batch=planner.model.batch // 2))
    gathers, reduces = _inside(site, site.devices)
    step_s = walk_step(site.layer_times("T4", site.model.batch // 2), gathers, reduces)
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
