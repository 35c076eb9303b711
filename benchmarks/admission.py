"""Who gets a slot, and what a slot is: a model of clusters that share the slots, of hours in seconds.

First the queue (dips/protocol/admission.py, as it is) against slots for whoever asks first: twelve fast clusters and
one with steps of 20 s, and nine of the paper's size. A cluster trains, asks at the boundaries of its inner steps, holds
its slot for as long as its push takes, and trains again.

Then slots for less than a push, at 16 slaves, 9 clusters and 2 slots. *By layer*: a slot is free for the next push when
its first layer is folded; at best all of the fold is saved. *By slave*: a push takes the slot of a slave when its first
worker gets there, and keeps it until it is folded, since the gate wants the norm of the whole model; admitted is what
fits on every slave up to its end, planned with the true times, in the first of 16 rotations that does. It is flattered:
links of slaves cost nothing, and a real plan errs, which would drop pushes or make them wait in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from statistics import mean
from typing import Protocol

from benchmarks.harness import Bench, main
from dips.protocol.admission import SlotAsk, SlotQueue

SLOTS, SLAVES = 2, 16
RETRY_S, SOON_S, MOST_KEPT_S = 2.0, 0.5, 3600.0
INSTALL_S = 5.0  # from the fold to the first step: window, update, pull
JITTER = 0.15
PUSHES_S = (60.0, 195.0)  # the paper's shortest and longest
FOLD_S, MEASURE_S = 1.4, 0.7  # 7.1 GB of a slave of 50 GB, 4 and 2 times through memory at 20 GB/s


@dataclass(frozen=True, slots=True)
class Trainer:
    """One cluster: its inner steps, and how long a slot is held by its push."""

    step_s: float
    steps: int
    push_s: float


@dataclass
class SlotUse:
    """What came of a run."""

    pushes: list[int]
    waits: list[list[float]]

    @property
    def worst(self) -> float:
        return max(max(times, default=0.0) for times in self.waits)

    @property
    def mean(self) -> float:
        return mean(mean(times) for times in self.waits if times)


class Room(Protocol):
    """Who is taken in."""

    def ask(self, i: int, push_s: float, now: float) -> float | None:
        """None: the push of cluster `i` has its slot; else the seconds after which to ask again."""

    def end(self, i: int) -> None:
        """Its push is folded."""


Rule = Callable[[Sequence[Trainer]], Room]


class FirstCome:
    """A slot for whoever asks while one is free."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.free = SLOTS

    def ask(self, i: int, push_s: float, now: float) -> float | None:
        if not self.free:
            return RETRY_S
        self.free -= 1
        return None

    def end(self, i: int) -> None:
        self.free += 1


class Queued(FirstCome):
    """The real queue."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        super().__init__(trainers)
        self.trainers, self.queue = trainers, SlotQueue()

    def ask(self, i: int, push_s: float, now: float) -> float | None:
        trainer = self.trainers[i]
        asked = SlotAsk(str(i), 100, trainer.step_s, trainer.push_s)
        answer = self.queue.request_slot(asked, self.free, RETRY_S, MOST_KEPT_S, now)
        if answer.admitted:
            self.free -= 1
            return None
        return SOON_S if answer.ahead < SLOTS else RETRY_S


class BySlave:
    """Slots of single slaves, taken when a worker gets there; first come, first served."""

    def __init__(self, workers: int, trainers: Sequence[Trainer]) -> None:
        self.workers = workers
        self.held: dict[int, tuple[float, list[float]]] = {}  # cluster → end, begin at each slave

    def ask(self, i: int, push_s: float, now: float) -> float | None:
        turns = SLAVES // self.workers
        for rotation in range(SLAVES):
            begins = [now + push_s / SLAVES * ((s + rotation) % turns) for s in range(SLAVES)]
            if all(self._fits(s, begins[s], now + push_s) for s in range(SLAVES)):
                self.held[i] = (now + push_s, begins)
                return None
        return RETRY_S

    def _fits(self, slave: int, begin: float, end: float) -> bool:
        """The most in use at once between begin and end; it is reached where some push begins."""
        others = [(begins[slave], until) for until, begins in self.held.values()]
        at = [begin, *(b for b, _ in others if begin < b < end)]
        return all(sum(b <= t < until for b, until in others) < SLOTS for t in at)

    def end(self, i: int) -> None:
        del self.held[i]


class Crowd:
    """Clusters that share the slots, played by a heap of events."""

    def __init__(self, rule: Rule, trainers: Sequence[Trainer], seed: int) -> None:
        self.trainers, self.room, self.rng = trainers, rule(trainers), Random(seed)
        self.use = SlotUse([0] * len(trainers), [[] for _ in trainers])
        self._first = dict[int, float]()  # who waits → since when
        self._events: list[tuple[float, int, int, Callable[[float, int], None]]] = []
        self._order = count()

    def live(self, lasts_s: float) -> SlotUse:
        """Let them train for so long; who waits at the end has waited that long."""
        for i, trainer in enumerate(self.trainers):
            self._train(self.rng.random() * trainer.step_s * trainer.steps, i, trainer.steps)
        while self._events[0][0] < lasts_s:
            now, _, i, happen = heappop(self._events)
            happen(now, i)
        for i, since in self._first.items():
            self.use.waits[i].append(lasts_s - since)
        return self.use

    def _train(self, now: float, i: int, steps: int) -> None:
        self._later(now + sum(self._odd(self.trainers[i].step_s) for _ in range(steps)), i, self._ask)

    def _ask(self, now: float, i: int) -> None:
        since, push_s = self._first.setdefault(i, now), self._odd(self.trainers[i].push_s)
        again_s = self.room.ask(i, push_s, now)
        if again_s is None:
            self.use.pushes[i] += 1
            self.use.waits[i].append(now - since)
            del self._first[i]
            self._later(now + push_s, i, self._end)
            return
        boundary = now + self._odd(self.trainers[i].step_s)
        while boundary < now + again_s:
            boundary += self._odd(self.trainers[i].step_s)
        self._later(boundary, i, self._ask)

    def _end(self, now: float, i: int) -> None:
        self.room.end(i)
        self._train(now + INSTALL_S, i, self.trainers[i].steps)

    def _odd(self, seconds: float) -> float:
        return seconds * (1 + JITTER * (2 * self.rng.random() - 1))

    def _later(self, at: float, i: int, happen: Callable[[float, int], None]) -> None:
        heappush(self._events, (at, next(self._order), i, happen))


CROWDS = {
    "12 fast, 1 slow, pushes of 5 s": ([Trainer(3.0, 3, 5.0)] * 12 + [Trainer(20.0, 3, 5.0)], 7_200.0),
    "12 fast, 1 slow, pushes of 10 s": ([Trainer(3.0, 3, 10.0)] * 12 + [Trainer(20.0, 3, 10.0)], 7_200.0),
    "9 as in the paper": ([Trainer(40.0, 10, 195.0)] * 9, 360_000.0),
    "8 of 5 s, 1 of 600 s steps": ([Trainer(5.0, 40, 100.0)] * 8 + [Trainer(600.0, 3, 100.0)], 360_000.0),
}


def measure(bench: Bench) -> None:
    """The queue, then what a slot is."""
    seeds = range(1 if bench.quick else 4)
    for name, (trainers, lasts_s) in CROWDS.items():
        bench.say(name)
        first, fair = ([Crowd(rule, trainers, s).live(lasts_s) for s in seeds] for rule in (FirstCome, Queued))
        total, total_first = (mean(sum(run.pushes) for run in runs) for runs in (fair, first))
        bench.row(f"pushes, {name}", total, "", against="no queue", of=total_first)
        worst, worst_first = (max(run.worst for run in runs) for runs in (fair, first))
        bench.row(f"longest wait, {name}", worst, "s", against="no queue", of=worst_first)
        last, last_first = (mean(mean(run.waits[-1]) / run.mean for run in runs) for runs in (fair, first))
        bench.note(f"{name}: the last waits {last:.2f} times the mean, without the queue {last_first:.2f} times")
    for push_s in PUSHES_S:
        _compare_slots(bench, push_s, seeds)


def _compare_slots(bench: Bench, push_s: float, seeds: Sequence[int]) -> None:
    bench.say(f"slots, pushes of {push_s:g} s")

    def run(name: str, rule: Rule, holds_s: float, against: float | None = None) -> float:
        runs = [Crowd(rule, [Trainer(40.0, 10, holds_s)] * 9, s).live(360_000.0) for s in seeds]
        pushes = mean(sum(run.pushes) for run in runs)
        bench.row(f"{name}, {push_s:g} s", pushes, "", against="slots of whole pushes" if against else "", of=against)
        bench.note(f"{name}, {push_s:g} s: mean wait {mean(run.mean for run in runs):.0f} s")
        return pushes

    whole = run("pushes, slots of whole pushes", FirstCome, push_s + MEASURE_S + FOLD_S)
    run("pushes, slots by layer", FirstCome, push_s + MEASURE_S, whole)
    for workers in (1, 4, 16):
        rule = partial(BySlave, workers)
        run(f"pushes, slots by slave, {workers} workers", rule, push_s + MEASURE_S + FOLD_S, whole)


if __name__ == "__main__":
    main("admission", __doc__, measure)
