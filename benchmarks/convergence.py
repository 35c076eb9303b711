"""What a model learns in an asynchronous outer loop, held against data parallel and synchronous DiLoCo at equal tokens.

Real inner steps of a small model on real text in virtual time (dips/study): four clusters, H 32, the paper's outer step
with and without its clip. Every method takes the same inner recipe; its own best inner learning rate is not sought yet.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from benchmarks.harness import Bench, main
from dips.protocol.options import Clip, OuterOptions
from dips.study.baselines import train_data_parallel, train_synchronous
from dips.study.emulator import Emulated, Fleet, emulate
from dips.study.learner import Recipe
from dips.transport.pipeline import available_cores

CLUSTERS, H = 4, 32
ROUNDS, QUICK_ROUNDS = 40, 12
SEEDS, QUICK_SEEDS = (1, 2, 3), (1,)
HALF = (1.0, 1.17, 1.33, 1.5)  # seconds of an inner step: 50 % between the fastest and the slowest
FIVEFOLD = (1.0, 1.38, 2.18, 5.23)
FREE = OuterOptions(clip=Clip())  # no clip


@dataclass(frozen=True, slots=True)
class Learned:
    """A run's row."""

    loss: float
    detail: str = ""


def _emulated(fleet: Fleet, outer: OuterOptions, tokens: int, seed: int) -> Learned:
    made = emulate(fleet, Recipe(), tokens, seed, outer)
    return Learned(made.loss, _describe(made))


def _describe(made: Emulated) -> str:
    steps = max(made.steps.values())
    return (
        f"{made.versions} versions, {made.clipped} clipped, staleness {made.mean_staleness:.2f}, "
        f"{made.effective_clusters:.2f} effective clusters, {steps} steps of the fastest"
    )


def _data_parallel(tokens: int, seed: int) -> Learned:
    made = train_data_parallel(Recipe(), CLUSTERS, tokens, seed)
    return Learned(made.loss, f"{made.steps} steps")


def _synchronous(tokens: int, seed: int) -> Learned:
    made = train_synchronous(Recipe(), CLUSTERS, H, tokens, seed)
    return Learned(made.loss, f"{made.steps} steps")


METHODS: Mapping[str, Callable[[int, int], Learned]] = {
    "data parallel": _data_parallel,
    "synchronous DiLoCo": _synchronous,
}
FLEETS: Mapping[str, tuple[Fleet, OuterOptions]] = {
    "aligned, equal clusters": (Fleet(inner_steps=H, aligned=True), FREE),
    "aligned, 50 % apart": (Fleet(HALF, H, aligned=True), FREE),
    "aligned, 5.23 times apart": (Fleet(FIVEFOLD, H, aligned=True), FREE),
    "steps, 50 % apart": (Fleet(HALF, H), FREE),
    "steps, 50 % apart, the paper's clip": (Fleet(HALF, H), OuterOptions()),
}


def learn(task: tuple[str, int, int]) -> Learned:
    """One run: its method, tokens and seed."""
    name, tokens, seed = task
    if name in METHODS:
        return METHODS[name](tokens, seed)
    fleet, outer = FLEETS[name]
    return _emulated(fleet, outer, tokens, seed)


def measure(bench: Bench) -> None:
    seeds, rounds = (QUICK_SEEDS, QUICK_ROUNDS) if bench.quick else (SEEDS, ROUNDS)
    tokens = rounds * CLUSTERS * H * Recipe().tokens
    names = [*METHODS, *FLEETS]
    tasks = [(name, tokens, seed) for seed in seeds for name in names]
    bench.say(f"{len(tasks)} runs of {tokens:,} tokens")
    with ProcessPoolExecutor(bench.args.workers or available_cores(), get_context("spawn")) as pool:
        found = dict(zip(tasks, pool.map(learn, tasks), strict=True))
    for name in names:
        losses = [found[name, tokens, seed].loss for seed in seeds]
        synchronous = [found["synchronous DiLoCo", tokens, seed].loss for seed in seeds]
        bench.row(name, statistics.mean(losses), "nats", against="synchronous DiLoCo", of=statistics.mean(synchronous))
        bench.note(f"{name}: {', '.join(f'{loss:.3f}' for loss in losses)}; {found[name, tokens, seeds[0]].detail}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, help="runs at a time; by default, one for each core")


if __name__ == "__main__":
    main("convergence", __doc__, measure, add_arguments)
