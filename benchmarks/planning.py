"""What `dips plan cluster` predicts, beside what is proved, published or run.

    python -m benchmarks planning --part schedules     # tuned compact_zb against the optimum that CP-SAT proves
    python -m benchmarks planning --part search        # against exhaustive search; Zorse's clusters with each model
    python -m benchmarks planning --part dryrun        # frozen orders repeated by real ranks on shaped links
    python -m benchmarks planning --part papers        # EDiT's Table 6, SpanTrain's settings, Zorse's tables beside
    ours python -m benchmarks planning --part handover      # torch's runtime plays the exported CSV; Megatron reads
    the layout

Every constant that a paper does not give is printed. CP-SAT is OR-Tools', of the dev extra. Metis' planner may not be
used commercially: `--part search --metis DIR` starts it from a checkout of yours, and nothing of it is here.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.harness import Bench, main
from dips.errors import ConfigError
from dips.inside.planning.group import list_groupings
from dips.inside.planning.profile import ClusterProfile, DeviceKind, parse_model, parse_profile
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.search import (
    PipelineChoice,
    Planner,
    RankedPlan,
    describe_choice,
    hide_sync,
    parameter_costs,
    share_microbatches,
)
from dips.inside.planning.simulate import (
    PassSeconds,
    Pipeline,
    Prediction,
    Route,
    make_chain,
    simulate,
    tune_depths,
)

if TYPE_CHECKING:
    from benchmarks.planning_metis import MetisPlan

INVENTORIES = Path(__file__).parents[1] / "configs" / "inventories"
INSTANCES, PROVE_S = 300, 6.0
STEP_TOKENS = 1 << 20  # of a step in Zorse §6.1

# ---- schedules -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instance:
    """A random chain of unequal stages, in whole seconds."""

    seconds: tuple[tuple[int, int, int], ...]
    link_s: tuple[int, ...]
    microbatches: int
    most_held: tuple[int, ...] | None

    def chain(self, schedule: ScheduleName, limited: bool = True) -> Pipeline:
        """Return the pipeline of one schedule."""
        held = self.most_held if limited else None
        return make_chain(
            schedule, [PassSeconds(*t) for t in self.seconds], self.link_s, self.microbatches, most_held=held
        )


def draw_instances(seed: int) -> Iterator[Instance]:
    """Yield chains of 2 to 4 stages, 3 to 8 micro-batches, links of 0 to 6, half of them with limits of memory."""
    rng = random.Random(seed)
    while True:
        p, m = rng.randint(2, 4), rng.randint(3, 8)
        forward = [rng.randint(1, 4) for _ in range(p)]
        seconds = tuple((f, f + rng.randint(0, 1), f) for f in forward)
        held = tuple(max(2, min(m, p - s + 1)) for s in range(p)) if rng.random() < 0.5 else None
        yield Instance(seconds, tuple(rng.randint(0, 6) for _ in range(p - 1)), m, held)


def prove_optimum(instance: Instance, limit_s: float) -> float | None:
    """Return the least seconds of any order of F, I and W, or None if CP-SAT does not prove it in time."""
    from ortools.sat.python import cp_model

    model, p, count = cp_model.CpModel(), len(instance.seconds), instance.microbatches
    horizon = int(count * sum(map(sum, instance.seconds)) + 2 * count * sum(instance.link_s) + 1)
    begin: dict[tuple[str, int, int], Any] = {}
    end: dict[tuple[str, int, int], Any] = {}
    for s, took in enumerate(instance.seconds):
        intervals = []
        for op, seconds in zip("FIW", took, strict=True):
            for m in range(count):
                start = model.new_int_var(0, horizon, "")
                begin[op, s, m], end[op, s, m] = start, start + seconds
                intervals.append(model.new_fixed_size_interval_var(start, seconds, ""))
                if m:  # micro-batches are alike: their order is no choice
                    model.add(begin[op, s, m - 1] <= start)
        model.add_no_overlap(intervals)
        for m in range(count):
            model.add(begin["I", s, m] >= end["F", s, m])
            model.add(begin["W", s, m] >= end["I", s, m])
        if instance.most_held:
            times = [begin["F", s, m] for m in range(count)] + [end["W", s, m] for m in range(count)]
            model.add_reservoir_constraint(times, [1] * count + [-1] * count, 0, instance.most_held[s])
    for s, link_s in enumerate(instance.link_s):
        for near, far, op in ((s, s + 1, "F"), (s + 1, s, "I")):
            transfers = []
            for m in range(count):
                leaves = model.new_int_var(0, horizon, "")
                model.add(leaves >= end[op, near, m])
                model.add(begin[op, far, m] >= leaves + link_s)
                transfers.append(model.new_fixed_size_interval_var(leaves, link_s, ""))
            model.add_no_overlap(transfers)
    last = model.new_int_var(0, horizon, "")
    for s, m in itertools.product(range(p), range(count)):
        model.add(last >= end["W", s, m])
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    return float(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None


def measure_schedules(bench: Bench) -> None:
    """Tuned compact_zb, its letter, ZB-H1 and GPipe over the optimum."""
    wanted = 20 if bench.quick else INSTANCES
    ratios: dict[str, list[float]] = {}
    tried = proved = 0
    for instance in itertools.islice(draw_instances(32), wanted):
        tried += 1
        best = prove_optimum(instance, PROVE_S)
        if best is None:
            continue
        proved += 1
        compact = instance.chain(ScheduleName.COMPACT_ZB)
        made = {
            "compact_zb, tuned": tune_depths(compact)[1].seconds,
            "compact_zb, the letter": simulate(compact).seconds,
        }
        if instance.most_held is None:  # GPipe and ZB-H1 know no limits
            made |= {str(n): simulate(instance.chain(n)).seconds for n in (ScheduleName.ZB_H1, ScheduleName.GPIPE)}
        for name, seconds in made.items():
            ratios.setdefault(name, []).append(seconds / best)
        if tried % 20 == 0:
            bench.say(f"{tried} of {wanted}, {proved} proved")
    tuned = ratios["compact_zb, tuned"]
    bench.row(
        "compact_zb tuned, mean", statistics.mean(tuned), "×", against="optimum", of=1.0, least=1 / 1.01, less=True
    )
    bench.row("compact_zb tuned, worst", max(tuned), "×", against="optimum", of=1.0, least=1 / 1.12, less=True)
    for name, found in list(ratios.items())[1:]:
        bench.row(f"{name}, mean", statistics.mean(found), "×", against="optimum", of=1.0, less=True)
        bench.row(f"{name}, worst", max(found), "×", against="optimum", of=1.0, less=True)
    bench.note(
        f"{proved} of {tried} optima proved in {PROVE_S:g} s each; ZB-H1 and GPipe without limits of memory only"
    )


# ---- search ----------------------------------------------------------------------------------------------------------


def draw_case(rng: random.Random) -> Planner:
    """Two to four single devices of unequal speed, six to eight layers of unequal weight, unequal links."""
    count, layers = rng.randint(2, 4), rng.randint(6, 8)
    names = [f"n{i}" for i in range(count)]
    profile = parse_profile(
        {
            "nodes": [{"name": name, "kind": name, "site": name} for name in names],
            "kinds": {name: {"memory_gb": 24, "tflops": rng.choice([20, 40, 60, 100])} for name in names},
            "links": {a: {b: rng.choice([0.1, 0.5, 1, 10]) for b in names} for a in names},
        },
        "case",
    )
    parts = [
        {
            "name": f"l{i}", "parameters": 10_000_000, "flops": rng.choice([1e12, 2e12]),
            "activation_bytes": 4e6, "border_bytes": rng.choice([5e5, 1e6, 2e6]),
        }
        for i in range(layers)
    ]  # fmt: skip
    return Planner(profile, parse_model({"name": "case", "batch": 8, "recompute": False, "layers": parts}, "case"))


def exhaust(planner: Planner) -> float:
    """The least seconds of every order × cut × micro-batch of pipelines over all devices, by two schedules."""
    best, layers = inf, len(planner.layers)
    for order in itertools.permutations(planner.devices):
        for inner in itertools.combinations(range(1, layers), len(order) - 1):
            for samples, schedule in itertools.product(
                (1, 2, 4), (ScheduleName.COMPACT_ZB, ScheduleName.BREADTH_FIRST)
            ):
                choice = PipelineChoice(schedule, tuple((d,) for d in order), (0, *inner, layers), samples)
                best = min(best, simulate(planner.make_pipeline(choice), spans=False).seconds)
    return best


def measure_search(bench: Bench) -> None:
    """Against exhaustive search, and how long Zorse's clusters take."""
    rng, worst = random.Random(5), 1.0
    for _ in range(2 if bench.quick else 10):
        planner = draw_case(rng)
        ranked = [plan.step_s for plan in planner.search().ranked if plan.choice is not None]
        worst = max(worst, min(ranked) / exhaust(planner))
        bench.say(f"{len(planner.devices)} devices × {len(planner.layers)} layers: worst so far {worst:.3f}")
    bench.row("search, worst", worst, "×", against="exhaustive search", of=1.0, least=1 / 1.03, less=True)
    for cluster, sizes in ZORSE.items():
        for model in ("llama-7b",) if bench.quick else sizes:
            planner = zorse_planner(cluster, model)
            begun = time.process_time()
            try:
                found = planner.search().ranked[0].name
            except ConfigError as error:
                found = str(error)
            took = time.process_time() - begun
            bench.row(f"zorse-{cluster}, {model}: search", took, "s", against="a minute", of=60.0, least=1.0, less=True)
            bench.say(f"zorse-{cluster}, {model}: {found}")
    for cluster, sizes_of_groups in ZORSE_GROUPS.items():
        planner = zorse_planner(cluster, "llama-7b")
        candidates = [sorted(map(len, g.groups)) for g in list_groupings(planner.profile, planner.speed_of)]
        name = f"zorse-{cluster}: the {len(sizes_of_groups)} groups of §6.2 among {len(candidates)} candidates"
        bench.row(name, float(sizes_of_groups in candidates), "", against="yes", of=1.0, least=1.0)
    compare_metis(bench, bench.args.metis)
    bench.note("seconds are of processor time; exhaustive search: two schedules, micro-batches of 1, 2 and 4 samples")


ZORSE_GROUPS = {"a": [2, 2, 8, 8], "b": [8, 16, 16, 24], "c": [8, 8, 16, 24, 24, 24, 24]}  # devices of each group


def compare_metis(bench: Bench, checkout: Path | None) -> None:
    """Metis' best plan on the same profile: its groups and layers, with the micro-batch and schedule that suit it best.

    16 devices: an A100 node and a T4 node of Zorse's cluster B, and a decoder of 1 B that fits everywhere.
    """
    if checkout is None:
        bench.row("Metis' planner beside ours: not run, for want of --metis DIR", 0, "plans")
        return
    from benchmarks.planning_metis import run_metis

    whole = parse_profile(read_inventory("zorse-b"), "zorse-b")
    profile = replace(whole, nodes=tuple(n for n in whole.nodes if n.name in ("a100-0", "t4-0")))
    for gbit in (100.0, 1.0):
        links = {a: {b: replace(link, gbit=gbit) for b, link in row.items()} for a, row in profile.links.items()}
        model = replace(parse_model(read_inventory("edit-1b"), "edit-1b"), batch=128, sequence=1024)
        planner = Planner(replace(profile, links=links), model)
        plans, took = run_metis(checkout, planner)
        place, theirs = next((i, s) for i, plan in enumerate(plans, 1) if (s := _play_metis(planner, plan)) < inf)
        begun = time.process_time()
        best = min(plan.step_s for plan in planner.search().ranked if plan.exact)
        own = time.process_time() - begun
        name = f"16 devices, {gbit:g} Gbit/s between nodes"
        bench.row(f"{name}: our plan", best, "s", against="Metis'", of=theirs, least=1.0, less=True)
        bench.row(f"{name}: our search", own, "s", against="Metis'", of=took, less=True)
        bench.note(f"{name}: Metis printed {len(plans)} plans; plan {place} is its first that fits our memory")


def _play_metis(planner: Planner, plan: MetisPlan) -> float:
    """Seconds of its groups and layers by the best of our schedules and micro-batches; inf if none fits."""
    best = inf
    for samples in (1, 2, 4, 8, 16):
        for schedule in (ScheduleName.COMPACT_ZB, ScheduleName.BREADTH_FIRST):
            try:
                choice = PipelineChoice(schedule, plan.groups, plan.cuts, samples)
                best = min(best, planner.finish(choice)[1].seconds)
            except ConfigError:  # memory, or fewer micro-batches than devices
                continue
    return best


ZORSE: Mapping[str, tuple[str, ...]] = {
    "a": ("llama-7b", "llama-13b", "llama-33b", "llama-65b"),
    "b": ("llama-7b", "llama-13b", "llama-33b"),
    "c": ("llama-7b", "llama-13b", "llama-33b"),
}
SEQUENCE = {"a": 4096, "b": 1024, "c": 512}  # Zorse §6.1


def read_inventory(name: str) -> Any:
    """Return the keys of a file of configs/inventories."""
    return yaml.safe_load((INVENTORIES / f"{name}.yaml").read_text())


def zorse_planner(cluster: str, model: str) -> Planner:
    """Return the planner of one cell of Zorse's Table 5."""
    sequence = SEQUENCE[cluster]
    made = replace(parse_model(read_inventory(model), model), sequence=sequence, batch=STEP_TOKENS // sequence)
    return Planner(parse_profile(read_inventory(f"zorse-{cluster}"), cluster), made)


# ---- papers ----------------------------------------------------------------------------------------------------------

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


def measure_papers(bench: Bench) -> None:
    """Each figure of the seeds that a formula or the simulator can give, beside the published one."""
    _compare_table_6(bench)
    _compare_table_2(bench)
    _compare_spantrain(bench)
    _compare_zorse(bench)


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


def _compare_table_2(bench: Bench) -> None:
    costs = parameter_costs(layers=24, parameters=1.0, ministages=4, devices=8, microbatches=16)
    for name, want in {"Zorse": (12, 0, 48), "PP + ZeRO-2": (24, 0, 48), "PP + ZeRO-3": (2, 2.75, 768)}.items():
        cost = costs[name]
        same = (cost.materialised, cost.sharded, cost.gathers) == want
        bench.row(f"Zorse Table 2: {name}, gathers", cost.gathers, "", against="paper", of=want[2], least=1.0)
        assert same, (name, cost)


def spantrain_planner(
    setting: int, batch: int = 128, gbit: float | None = None, efficiency: float | None = None
) -> Planner:
    """Return GPT-2 on SpanTrain's ten servers."""
    profile = parse_profile(read_inventory(f"spantrain-{setting}"), "spantrain")
    if gbit is not None:
        slow = {
            a: {b: replace(l, gbit=gbit) if "cloud" in (a, b) and a != b else l for b, l in row.items()}
            for a, row in profile.links.items()
        }
        profile = replace(profile, links=slow)
    if efficiency is not None:
        profile = replace(profile, kinds={k: replace(d, efficiency=efficiency) for k, d in profile.kinds.items()})
    return Planner(profile, replace(parse_model(read_inventory("gpt-2"), "gpt-2"), batch=batch))


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


def _compare_spantrain(bench: Bench) -> None:
    """Throughput of SpanTrain's plan over its baselines; published ratios beside ours, no bar."""
    for setting, ddp, fsdp in ((1, "2.3–2.38", "2.05–2.11"), (2, "1.74–1.85", "1.61–1.76")):
        planner = spantrain_planner(setting)
        best = best_pipeline(planner)
        over = planner.shard_fully(planner.devices, equal=True)
        bench.row(
            f"SpanTrain setting {setting}: over FSDP",
            over.step_s / best.step_s,
            "×",
            against=f"paper {fsdp}, DDP {ddp}",
        )
    planner = spantrain_planner(1)
    ours = best_pipeline(planner)
    for name, schedule, paper in (
        ("GPipe", ScheduleName.GPIPE, "1.13–1.71"),
        ("1F1B", ScheduleName.ONE_F_ONE_B, "1.04–1.57"),
    ):
        if ours.choice is None:
            continue
        same = replace(ours.choice, schedule=schedule, ministages=1, depths=(), offload=False)
        p = len(same.groups)
        cuts = same.cuts if len(same.cuts) == p + 1 else planner.cut_layers(same.groups, 1, same.samples)
        if cuts is None:
            continue
        try:
            other = simulate(planner.make_pipeline(replace(same, cuts=cuts)), spans=False).seconds
        except ConfigError as error:
            bench.note(f"{name} on SpanTrain's groups: {error}")
            continue
        bench.row(
            f"SpanTrain setting 1: over {name} on the same groups", other / ours.step_s, "×", against=f"paper {paper}"
        )
    ratio = {
        gbit: best_pipeline(spantrain_planner(1, gbit=gbit)).rate
        for gbit in ((0.1, 1.0) if bench.quick else (0.05, 0.1, 0.25, 0.5, 1.0))
    }
    for gbit, rate in ratio.items():
        bench.row(
            f"SpanTrain setting 1 with {1 / gbit:g} × slower lines", rate, "samples/s", against="without", of=ratio[1.0]
        )
    big = best_pipeline(spantrain_planner(1, batch=256)).rate
    bench.row("SpanTrain batch 256 over 128", 100 * (big / ours.rate - 1), "%", against="paper 6.8–16.2")

    for servers in (1, 3) if bench.quick else (1, 3, 6):
        few = spantrain_planner(1)
        few = Planner(_with_servers(few.profile, servers), few.model)
        gain = few.shard_fully(few.devices, equal=True).step_s / best_pipeline(few).step_s
        bench.row(f"SpanTrain Fig. 13, {servers} servers: over FSDP", gain, "×", against="paper's mean 2.79")

    def whole_sites(choice: PipelineChoice) -> bool:
        """No second level: a first-level group is one stage."""
        return all(len({d.split("-")[0] for d in group}) == 1 for group in choice.groups) and len(choice.groups) <= 3

    flat = best_pipeline(planner, whole_sites).rate
    bench.row("SpanTrain without a second level", 100 * (flat / ours.rate - 1), "%", against="paper −11, −12")
    bench.note(
        "SpanTrain: GPT-2, sequences of 512, 45 % of the FLOP/s, latencies of 1 and 0.2 ms: ours, not the paper's"
    )


def _compare_zorse(bench: Bench) -> None:
    """Table 5 beside ours, no bar: efficiency is a constant of ours."""
    published = {
        ("a", "llama-7b"): 4370.56, ("a", "llama-13b"): 4917.87,
        ("a", "llama-33b"): 5281.64, ("a", "llama-65b"): 5239.13,
        ("b", "llama-7b"): 3412.88, ("b", "llama-13b"): 2965.64, ("b", "llama-33b"): 2658.29,
        ("c", "llama-7b"): 3936.94, ("c", "llama-13b"): 3357.97, ("c", "llama-33b"): 1548.60,
    }  # fmt: skip
    for (cluster, model), tflops in published.items():
        if bench.quick and model != "llama-7b":
            continue
        planner = zorse_planner(cluster, model)
        try:
            best = best_pipeline(planner)
        except ConfigError as error:
            bench.note(f"Zorse {cluster}, {model}: {error}")
            continue
        bench.row(
            f"Zorse Table 5: {cluster}, {model}",
            planner.model.flops / best.step_s / 1e12,
            "TFLOPS",
            against="paper",
            of=tflops,
        )
        bench.say(f"{cluster}, {model}: {best.name}")
    bench.note(f"Zorse: {DeviceKind(1, 1).efficiency:.0%} of peak FLOP/s on every device, vendors' links")


# ---- dry run ---------------------------------------------------------------------------------------------------------

PLANS, RANKS, LINK_MBIT = 20, 5, 200.0
NEAR, PROPER, RANKED = (
    0.10,
    0.9,
    0.95,
)  # of the simulator's seconds; share of the plans that must be so near; Spearman's


def measure_dryrun(bench: Bench) -> None:
    """Frozen orders repeated by gloo ranks in namespaces: real bytes on shaped links, computations as sleeps."""
    from benchmarks.line_program import open_programs
    from benchmarks.namespaces import missing, network

    if reason := missing():
        raise SystemExit(f"planning --part dryrun: {reason}")
    rng = random.Random(17)
    predicted, took = list[float](), list[float]()
    with (
        TemporaryDirectory() as directory,
        network({f"r{i}": LINK_MBIT for i in range(RANKS)}, "10.231.9") as hosts,
        open_programs() as start,
    ):
        ends = list(hosts.values())
        with ThreadPoolExecutor(RANKS) as pool:  # each answers when all have come
            ranks = list(
                pool.map(
                    lambda i: start(ends[i], "planning_rank", str(i), str(RANKS), f"{directory}/store"), range(RANKS)
                )
            )
        for number in range(6 if bench.quick else PLANS):
            pipeline = _draw_plan(rng)
            played = simulate(pipeline, spans=False)
            for i, rank in enumerate(ranks):
                rank.send_request(*_request(pipeline, played, number, i))
            predicted.append(played.seconds)
            took.append(max(rank.read_answer() for rank in ranks))
            bench.say(f"{pipeline.schedule}: {took[-1]:.2f} s for {played.seconds:.2f}")
    near = sum(abs(t / p - 1) <= NEAR for t, p in zip(took, predicted, strict=True))
    bench.row("plans within 10 % of the simulator", near, "", against="all", of=float(len(took)), least=PROPER)
    bench.row("rank correlation", correlate_ranks(predicted, took), "", against="perfect", of=1.0, least=RANKED)
    bench.note(f"load of the machine {os.getloadavg()[0]:.1f}: sleeps and gloo's threads wait behind others")


def _draw_plan(rng: random.Random) -> Pipeline:
    """3 to 5 stages of one rank on one link each, computations of 0.1 to 0.4 s, transfers of up to twice that."""
    p, m = rng.randint(3, RANKS), rng.randint(3, 6)
    seconds = []
    for _ in range(p):
        f = round(rng.uniform(0.1, 0.3), 2)
        seconds.append(PassSeconds(f, round(f * rng.uniform(1.0, 1.3), 2), f))
    byte_s = 8 / (LINK_MBIT * 1e6) * 1514 / 1448  # a packet has headers
    nbytes = tuple(float(int(rng.uniform(0.05, 0.5) / byte_s)) for _ in range(p - 1))
    schedule = rng.choice(list(ScheduleName))
    chain = make_chain(schedule, seconds, [0.0] * (p - 1), m)
    return replace(
        chain,
        border_bytes=nbytes,
        route=lambda a, b: Route(0.0, ((("out", a), byte_s), (("in", b), byte_s))),
    )


def _request(pipeline: Pipeline, played: Prediction, number: int, rank: int) -> tuple[Any, ...]:
    """The words of a play for one rank."""
    p = len(pipeline.stages)
    if rank >= p:
        return number, None, p, [], {}, [0, 0]
    device = pipeline.stages[rank].devices[0]
    own = device.seconds[0]
    order = [(str(a.op), a.microbatch) for a in played.orders[device.name] if a.microbatch is not None]
    borders = [0, *map(int, pipeline.border_bytes), 0]
    return number, rank, p, order, {"F": own.f, "I": own.i, "W": own.w, "B": own.i + own.w}, borders[rank : rank + 2]


def correlate_ranks(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's correlation."""
    orders = [sorted(range(len(row)), key=row.__getitem__) for row in (a, b)]
    places = [{index: place for place, index in enumerate(order)} for order in orders]
    n = len(a)
    return 1 - 6 * sum((places[0][i] - places[1][i]) ** 2 for i in range(n)) / (n * (n * n - 1))


# ---- hand-over -------------------------------------------------------------------------------------------------------


def measure_handover(bench: Bench) -> None:
    """Plans with uneven layers, played by torch's runtime from the CSV; the layout as Megatron-core reads it."""
    from benchmarks.planning_handover import play_csv, read_layout

    for number, (speeds, batch) in enumerate(
        (((100, 50), 8), ((30, 100), 8), ((100, 60, 30), 6), ((40, 80, 100), 8), ((90, 30), 4))
    ):
        if bench.quick and number > 1:
            break
        worst, layers = play_csv(speeds, batch)
        bench.row(f"torch's runtime, layers {layers}", worst, "", against="one process", of=1e-6, least=1.0, less=True)
        planned, read = read_layout(speeds, batch)
        bench.row(
            f"Megatron's layout, layers {planned}", float(planned == read), "", against="the plan", of=1.0, least=1.0
        )


# ---- shares ----------------------------------------------------------------------------------------------------------

SPEEDS, SAMPLE_S = (3, 1), 0.3  # of two devices; of a layer's forward for one sample on the slow one
SHARES_GAIN = 1.85  # 2.0 is all there is


def measure_shares(bench: Bench) -> None:
    """Tokens a second of plain FSDP2 by shares of the devices' speeds, over those of equal shares; layers are slept."""
    from benchmarks.planning_shares import BLOCKS, play_shares

    total = sum(SPEEDS)
    unequal = [(len(own), len(own)) for own in share_microbatches([1 / v for v in SPEEDS], total)]
    equal = [(total // len(SPEEDS), total // len(SPEEDS))] * len(SPEEDS)
    sample_s = [SAMPLE_S * SPEEDS[-1] / v for v in SPEEDS]
    found = play_shares(sample_s, {"equal": equal, "unequal": unequal}, 1 if bench.quick else 3)
    (equal_s, equal_loss), (unequal_s, unequal_loss) = found["equal"], found["unequal"]
    name = f"FSDP2, speeds {':'.join(map(str, SPEEDS))}, micro-batches {':'.join(str(n) for _, n in unequal)}"
    bench.row(f"{name}: samples/s", total / unequal_s, "", against="equal shares", of=total / equal_s)
    bench.row(f"{name}: gain", equal_s / unequal_s, "×", against="a bar", of=SHARES_GAIN, least=1.0)
    off = max(abs(unequal_loss / equal_loss - 1), 1e-9)  # they may be equal to the bit
    bench.row(f"{name}: loss off that of equal shares", off, "", against="1e-5", of=1e-5, least=1.0, less=True)
    bench.note(
        f"{BLOCKS} layers, {SAMPLE_S:g} s of forward for a sample on the slow rank, backward twice that; 2.0 is all"
    )


PARTS: Mapping[str, Callable[[Bench], None]] = {
    "schedules": measure_schedules,
    "search": measure_search,
    "papers": measure_papers,
    "dryrun": measure_dryrun,
    "handover": measure_handover,
    "shares": measure_shares,
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=list(PARTS), default="papers", help="what to compare")
    parser.add_argument("--metis", type=Path, metavar="DIR", help="a checkout of SamsungLabs/Metis, for --part search")


def measure(bench: Bench) -> None:
    PARTS[bench.args.part](bench)


if __name__ == "__main__":
    main("planning", __doc__, measure, _arguments)
