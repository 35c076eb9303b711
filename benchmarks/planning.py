"""What `dips plan cluster` predicts, beside what is proved, published or run.

    python -m benchmarks planning --part schedules     # tuned compact_zb against the optimum that CP-SAT proves
    python -m benchmarks planning --part search        # against exhaustive search; Zorse's clusters with each model
    python -m benchmarks planning --part dryrun        # frozen orders repeated by real ranks on shaped links
    python -m benchmarks planning --part papers        # EDiT's Table 6, SpanTrain's settings, Zorse's tables: beside
    python -m benchmarks planning --part handover      # torch's runtime plays the CSV; Megatron reads the layout

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
from dips.inside.planning.profile import parse_model, parse_profile
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.search import (
    PipelineChoice,
    Planner,
    share_microbatches,
)
from dips.inside.planning.simulate import (
    PassSeconds,
    Prediction,
    Route,
    SimulatedPipeline,
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

    def chain(self, schedule: ScheduleName, limited: bool = True) -> SimulatedPipeline:
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
    hold_groups(bench)
    compare_metis(bench, bench.args.metis)
    bench.note("seconds are of processor time; exhaustive search: two schedules, micro-batches of 1, 2 and 4 samples")


def hold_groups(bench: Bench) -> None:
    """The groups that Zorse prints are among those that we search."""
    for cluster, sizes_of_groups in ZORSE_GROUPS.items():
        planner = zorse_planner(cluster, "llama-7b")
        candidates = [sorted(map(len, g.groups)) for g in list_groupings(planner.profile, planner.speed_of)]
        name = f"zorse-{cluster}: the {len(sizes_of_groups)} groups of §6.2 are among the candidates"
        bench.row(name, float(sizes_of_groups in candidates), "", against="yes", of=1.0, least=1.0)
        bench.note(f"{name}, {len(candidates)} of them")


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


def _draw_plan(rng: random.Random) -> SimulatedPipeline:
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


def _request(pipeline: SimulatedPipeline, played: Prediction, number: int, rank: int) -> tuple[Any, ...]:
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


def measure_papers(bench: Bench) -> None:
    """Figures that were published, beside ours."""
    from benchmarks.planning_papers import compare_papers

    compare_papers(bench, bench.args.plot)


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
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the figures of --part papers")
    parser.add_argument("--metis", type=Path, metavar="DIR", help="a checkout of SamsungLabs/Metis, for --part search")


def measure(bench: Bench) -> None:
    PARTS[bench.args.part](bench)


if __name__ == "__main__":
    main("planning", __doc__, measure, _arguments)
