"""Aligned pace: four clusters of very unequal speed meet in the same window, round after round.

A real master, two slaves and four agents with their trainers on loopback; inner steps are sleeps whose lengths give
throughputs of 5.23 : 3.8 : 2.4 : 1. Once with steady steps, and once with lengths that wander by 10 % up and down,
drawn anew after each second of training, so that it does not vanish in the mean. Slots: one for each cluster; window
and all else are the defaults. Counted are the rounds after the third: those in which all four took part; and tokens a
second against what the inner steps alone would give, had nobody an outer loop.

Source: docs/architecture.md#pace.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Bench, main
from benchmarks.lone_slave import equal_layers
from benchmarks.timed_rank import Stretch, TimedPlan
from benchmarks.timed_run import TimedRun

SPEEDS = {"c0": 5.23, "c1": 3.8, "c2": 2.4, "c3": 1.0}
SLOWEST_STEP_S = 0.105
# H that each would take by itself: a round takes 4.6 s. Heartbeats bring the common windows, every 2 s, and ranks look
# for them at least every 3 s; rounds that are shorter than both do not meet.
INNER_STEPS = 128
PARAMETERS, LAYERS, SLAVES = 400_000, 4, 2
JITTERS = {"steady": 0.0, "jitter": 0.1}
SETTLING = 3  # rounds
ROUNDS = 10
LEAST_MET, LEAST_TOKENS = 9, 0.95
WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Met:
    """What a run showed after its first rounds."""

    rounds: int  # in which all took part
    of: int
    tokens: float  # a second, of all clusters together
    ideal: float  # without any outer loop
    steps: dict[str, list[int]]  # of each cluster in each of its rounds


def measure(bench: Bench) -> None:
    """Steady, then with jitter."""
    rounds, names = (3, ("jitter",)) if bench.quick else (ROUNDS, tuple(JITTERS))
    with tempfile.TemporaryDirectory(prefix="dips-bench-") as made:
        for name in names:
            bench.say(f"{name}: {SETTLING + rounds} rounds")
            met = lived(Path(made) / name, JITTERS[name], rounds)
            bench.row(
                f"rounds in which all met, {name}", met.rounds, "",
                against=f"{LEAST_MET} of {ROUNDS}", of=LEAST_MET / ROUNDS * met.of, least=1.0,
            )  # fmt: skip
            bench.row(
                f"tokens a second, {name}", met.tokens, "1/s", against="no outer loop", of=met.ideal, least=LEAST_TOKENS
            )
            bench.note(f"inner steps in a round, {name}: " + ", ".join(map(_range, met.steps.values())))


def lived(directory: Path, jitter: float, rounds: int) -> Met:
    """Let the four train until so many rounds are over."""
    plans = {
        name: TimedPlan(len(SPEEDS), LAYERS, PARAMETERS // LAYERS, SLOWEST_STEP_S / speed, jitter)
        for name, speed in SPEEDS.items()
    }
    keys, last = {"pace": {"aligned": INNER_STEPS}}, SETTLING + rounds
    with TimedRun(directory, equal_layers(PARAMETERS, LAYERS), plans, keys, slaves=SLAVES, versions=last) as run:
        run.finish(WITHIN_S)
        counted = run.contributions()[SETTLING:last]
        whole = {name: [s for s in run.stretches(name) if SETTLING < s.version <= last] for name in SPEEDS}
    absent = [name for name, stretches in whole.items() if not stretches]
    if absent:
        raise RuntimeError(f"{', '.join(absent)} took part in no round after the first {SETTLING}")
    tokens, ideal = (sum(rate) for rate in zip(*map(rates, whole.values()), strict=True))
    steps = {name: [s.steps for s in stretches] for name, stretches in whole.items()}
    return Met(sum(n == len(SPEEDS) for n in counted), rounds, tokens, ideal, steps)


def rates(stretches: list[Stretch]) -> tuple[float, float]:
    """Inner steps in a second of time, and of the time that they take by themselves."""
    steps, alone_s = sum(s.steps for s in stretches), sum(s.alone_s for s in stretches)
    return steps / (alone_s + sum(s.standstill_s for s in stretches)), steps / alone_s


def _range(steps: list[int]) -> str:
    return f"{min(steps)} to {max(steps)}"


if __name__ == "__main__":
    main("pace", __doc__, measure)
