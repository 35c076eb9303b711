"""Plans run by dips/inside/pipeline on gloo ranks of this machine, whose layers are slept.

    python -m benchmarks pipeline --part predict    # 20 random plans against the simulator's seconds, then real layers
    python -m benchmarks pipeline --part shares     # two ranks of speeds 3 : 1, unequal shares beside equal ones
    python -m benchmarks pipeline --part ministages # memory by account, and what offload takes
    python -m benchmarks pipeline --part setting1   # SpanTrain's sites on shaped links, beside torch's schedules
    python -m benchmarks pipeline --part looped     # equal groups, beside torch's ScheduleLoopedBFS

A layer is a sleep of 0.1 s and more on a device of speed 1, so that what is measured are the orders, transfers and
collectives of the runtime, not this machine's arithmetic. Bytes are few but for setting1: links are the simulator's to
check (`planning --part dryrun`).
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from dataclasses import replace

from benchmarks.harness import Bench, main
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.search import deal_microbatches
from dips.inside.planning.simulate import (
    PassSeconds,
    PipelineDevice,
    PipelineStage,
    Prediction,
    Route,
    SimulatedPipeline,
    StalledPipeline,
    simulate,
)

PLANS, NEAR, PROPER = 20, 0.1, 0.9  # of which 18 within 10 %
GAINED = 1.85  # × the tokens of equal shares, at speeds 3 : 1; 2.0 is all there is
LATENCY_S = 0.001


def measure_predict(bench: Bench) -> None:
    """Seconds of a step beside the simulator's, for random plans of unequal stages, and for layers that compute."""
    from benchmarks.pipeline_rank import measure_step
    from benchmarks.pipeline_real import compare_real

    rng, found = random.Random(23), list[tuple[float, float, int]]()
    for _ in range(5 if bench.quick else PLANS):
        pipeline, played = draw_plan(rng)
        took, actions = measure_step(pipeline, played, 2)
        found.append((took, played.seconds, actions))
        shape = "+".join(str(len(stage.devices)) for stage in pipeline.stages)
        bench.say(f"{pipeline.schedule} {shape} × {pipeline.ministages}: {took:.2f} s for {played.seconds:.2f}")
    near = sum(abs(took / wanted - 1) <= NEAR for took, wanted, _ in found)
    bench.row("plans within 10 % of the simulator", near, "", against="all", of=float(len(found)), least=PROPER)
    bench.row("an action takes besides", max((took - wanted) / n for took, wanted, n in found), "s")
    compare_real(bench)
    bench.note(f"load of the machine {os.getloadavg()[0]:.1f}: sleeps and gloo's threads wait behind others")


def measure_shares(bench: Bench) -> None:
    """One stage of two devices, speeds 3 : 1: FSDP2 with the shares that `deal_microbatches` gives, and equal ones."""
    from benchmarks.pipeline_rank import measure_step

    seconds = [PassSeconds(0.1, 0.1, 0.1), PassSeconds(0.3, 0.3, 0.3)]
    shares = {
        "equal": ((0, 2, 4, 6), (1, 3, 5, 7)),
        "unequal": deal_microbatches(tuple(took.total_s for took in seconds), 8),
    }
    took = {}
    for name, of in shares.items():
        devices = tuple(PipelineDevice(f"d{i}", share, (seconds[i],)) for i, share in enumerate(of))
        pipeline = _join(ScheduleName.GPIPE, (PipelineStage(devices, (0.0,), (0.0,)),), 1)
        took[name], _ = measure_step(pipeline, simulate(pipeline), 1 if bench.quick else 3)
        bench.row(f"a step with {name} shares", took[name], "s")
    bench.row(
        "tokens a second by unequal shares", took["equal"] / took["unequal"], "×", against="1.85", of=1.0, least=GAINED
    )


def measure_ministages(bench: Bench) -> None:
    """Memory and seconds by the number of ministages, with offload and without."""
    from benchmarks.pipeline_ministages import compare_ministages

    compare_ministages(bench)


def draw_plan(rng: random.Random) -> tuple[SimulatedPipeline, Prediction]:
    """Draw 1 to 3 stages of 1 or 2 ranks, a schedule, and 1 to 3 ministages of breadth_first; simulate it."""
    while True:
        sizes = [rng.randint(1, 2) for _ in range(rng.randint(1, 3))]
        schedule = rng.choice(list(ScheduleName))
        ministages = rng.randint(1, 3) if schedule is ScheduleName.BREADTH_FIRST else 1
        total, stages = rng.randint(max(sizes) + 1, 6), []
        for s, size in enumerate(sizes):
            speeds = [rng.uniform(0.5, 1.0) for _ in range(size)]
            works = [[rng.uniform(0.1, 0.2) for _ in range(3)] for _ in range(ministages)]
            rows = [tuple(PassSeconds(*(x / speed for x in work)) for work in works) for speed in speeds]
            shares = deal_microbatches(tuple(sum(took.total_s for took in row) for row in rows), total)
            devices = tuple(PipelineDevice(f"s{s}d{i}", shares[i], rows[i]) for i in range(size))
            collective = (LATENCY_S,) * ministages if size > 1 else ()
            stages.append(PipelineStage(devices, collective, collective, depth=rng.randint(2, total)))
        pipeline = _join(schedule, tuple(stages), ministages)
        try:
            return pipeline, simulate(pipeline)
        except StalledPipeline:
            continue  # 1f1b and zb_h1 over unequal shares


def _join(schedule: ScheduleName, stages: tuple[PipelineStage, ...], ministages: int) -> SimulatedPipeline:
    borders = (1.0,) * (len(stages) * ministages - 1)
    made = SimulatedPipeline(schedule, stages, borders, lambda _, __: Route(LATENCY_S, ()), ministages)
    return replace(made, keep=ministages == 1)


def measure_setting1(bench: Bench) -> None:
    """Three sites on shaped links."""
    from benchmarks.pipeline_anchors import compare_sites

    compare_sites(bench)


def measure_looped(bench: Bench) -> None:
    """Equal groups, which torch runs itself."""
    from benchmarks.pipeline_anchors import compare_looped

    compare_looped(bench)


PARTS: dict[str, Callable[[Bench], None]] = {
    "predict": measure_predict,
    "shares": measure_shares,
    "ministages": measure_ministages,
    "setting1": measure_setting1,
    "looped": measure_looped,
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=list(PARTS), default="predict", help="what to compare")


def measure(bench: Bench) -> None:
    PARTS[bench.args.part](bench)


if __name__ == "__main__":
    main("pipeline", __doc__, measure, _arguments)
