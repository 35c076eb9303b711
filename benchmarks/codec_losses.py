"""What a small model learns where pushes and pulls are lossy, held against fp32, and how far chance alone moves that.

The runs of codecs.py: three clusters, one after the other in one process, 20 outer steps, every cluster in every round,
so that no timing is in it and a run repeats bit for bit. All the same a single run tells nothing of half a percent: it
is chaotic, and two fp32 runs end that far apart if θ differs at the begin by a thousandth of itself. So each seed has
several such starts, the same for all ways; what is held is the mean over them. *Random errors* are fp32 pushes with
errors as large as int4's, drawn evenly and fed back as a codec's: what an effect of int4 must be compared with.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.codecs import CLUSTERS, F32, CodecChannel, average, channels, train
from benchmarks.harness import Bench, main
from dips.codecs import Codec
from dips.transport.lane import available_cores

SEEDS, STARTS, ROUNDS = (0, 1, 2), (1, 2, 3, 4, 5), 20
LEAST = 0.995  # fp32's mean loss over a codec's, of each seed: it may not be worse by more


class CodecWay(NamedTuple):
    """How a run pushes and pulls."""

    push: str
    pull: str

    def __str__(self) -> str:
        names = {FP32: "fp32 both ways", RANDOM: "random errors as large as int4's"}
        return names.get(self, f"{self.push} pushes, {self.pull} pulls")


FP32, RANDOM = CodecWay("fp32", "fp32"), CodecWay("random errors", "fp32")
WAYS = (CodecWay("int8", "int8"), CodecWay("int4", "int8"), RANDOM)
HELD = WAYS[:2]


class LossCase(NamedTuple):
    """One run."""

    way: CodecWay
    seed: int
    start: int


@dataclass
class RandomErrors(CodecChannel):
    """A channel whose errors are as large as int4's and have nothing to do with what it carries."""

    drawn: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def bring(self, difference: F32) -> F32:
        carried = np.asarray(difference + self.owed, np.float32)
        blocks = np.pad(carried, (0, -carried.size % Codec.INT4.block)).reshape(-1, Codec.INT4.block)
        steps = np.abs(blocks).max(axis=1, keepdims=True) / Codec.INT4.largest
        errors = (steps * self.drawn.uniform(-0.5, 0.5, blocks.shape)).reshape(-1)[: carried.size]
        brought: F32 = (carried + errors).astype(np.float32)
        self.owed = carried - brought
        return brought


def take(case: LossCase, rounds: int) -> float:
    """The loss of one run."""
    torch.set_num_threads(1)
    push = channels(Codec[case.way.push.upper()], True) if case.way.push in list(Codec) else random_channels(case)
    return train(partial(average, push), rounds, pull=Codec[case.way.pull.upper()], seed=case.seed, start=case.start)


def random_channels(case: LossCase) -> list[CodecChannel]:
    drawn = np.random.default_rng((case.seed, case.start))
    return [RandomErrors(Codec.FP32, True, drawn=drawn) for _ in range(CLUSTERS)]


def measure(bench: Bench) -> None:
    seeds, starts, rounds = (SEEDS[:1], STARTS[:2], 5) if bench.quick else (SEEDS, STARTS, ROUNDS)
    cases = [LossCase(way, seed, start) for start in starts for seed in seeds for way in (FP32, *WAYS)]
    workers = bench.args.workers or available_cores()
    bench.say(f"{len(cases)} runs of {rounds} outer steps, {workers} at a time")
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        found = dict(zip(cases, pool.map(partial(take, rounds=rounds), cases), strict=True))
    for seed in seeds:
        report_seed(bench, found, seed, starts)
    for way in WAYS:
        changes = [found[LossCase(way, s, k)] / found[LossCase(FP32, s, k)] - 1 for s in seeds for k in starts]
        bench.note(f"{way}, all seeds: {describe(changes)} against fp32 from the same start")


def report_seed(bench: Bench, found: Mapping[LossCase, float], seed: int, starts: Sequence[int]) -> None:
    """The mean over the starts, and what a single run might have told instead."""
    exact = [found[LossCase(FP32, seed, start)] for start in starts]
    mean = statistics.mean(exact)
    bench.row(f"seed {seed}, {FP32}", mean, "nats")
    alone = ", ".join(f"{loss / mean - 1:+.2%}" for loss in exact)
    bench.note(f"seed {seed}, fp32 against the mean of fp32, start by start: {alone}")
    for way in WAYS:
        losses = [found[LossCase(way, seed, start)] for start in starts]
        least = LEAST if way in HELD and not bench.quick else None
        bench.row(
            f"seed {seed}, {way}", statistics.mean(losses), "nats", against="fp32", of=mean, least=least, less=True
        )
        changes = [loss / of - 1 for loss, of in zip(losses, exact, strict=True)]
        bench.note(f"seed {seed}, {way} against fp32 from the same start: {describe(changes)}")


def describe(changes: Sequence[float]) -> str:
    """Mean, its standard error, and all of them."""
    error = statistics.stdev(changes) / sqrt(len(changes))
    return f"{statistics.mean(changes):+.2%} ± {error:.2%} ({', '.join(f'{c:+.2%}' for c in changes)})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, help="runs at a time; by default, one for each core")


if __name__ == "__main__":
    main("codec_losses", __doc__, measure, add_arguments)
