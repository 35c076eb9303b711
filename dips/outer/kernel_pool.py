"""Spreads the kernels over the layers of a slave, a slice a task, on the threads it is given; bytes worked through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dips.codecs import Codec
from dips.outer.pool import BYTES, Arrays
from dips.outer.updates import Fields, Update, cut_parameters
from dips.outer_step import Numbers, OuterStep
from dips.quantisers import Codes

# ---- work meter -----------------------------------------------------------------------------------------------------
# How much a slave has worked through: bytes of kernels and of its disk, counted by their threads.
#
# What lasts minutes is told from what hangs by this number alone: it rises, or it does not. Reading a snapshot, or
# restoring one from a mirror, is shown while it lasts: nothing else is counted then, since the slave serves no version.


@dataclass(frozen=True, slots=True)
class LongWork:
    """Work on the disk or a mirror that lasts."""

    doing: str  # for people: `reads v3@r5`
    total: int  # bytes
    before: int  # of the meter when it began
    began_at: float  # by the meter's clock
    is_wanted: Callable[[], bool]  # whether somebody waits for it still


class WorkMeter:
    """Bytes since the start of the process; any thread adds, any thread reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.nbytes = 0
        self._clock = clock
        self._long: LongWork | None = None  # replaced as a whole
        self._lock = threading.Lock()

    @contextmanager
    def long_work(self, doing: str, total: int, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Show the bytes that are added within the context as the progress of this work of `total` bytes, as long as
        `is_wanted`, and no other work has begun.
        """
        work = self._long = LongWork(doing, total, self.nbytes, self._clock(), is_wanted)
        try:
            yield
        finally:
            if self._long is work:
                self._long = None

    def read_progress(self) -> tuple[str, int, int, float] | None:
        """Return what long work does, its bytes done, its bytes in all, and its bytes a second; None without any."""
        work = self._long
        if work is None or not work.is_wanted():
            return None
        done, took_s = min(self.nbytes - work.before, work.total), self._clock() - work.began_at
        return work.doing, done, work.total, done / took_s if took_s else 0.0

    def add(self, nbytes: int) -> None:
        """Add to the bytes that are worked through."""
        with self._lock:
            self.nbytes += nbytes


# ---- kernel pool ----------------------------------------------------------------------------------------------------
# A slice has a fixed size and partial sums are added in the order of slices, so results have the same bits whatever the
# number of threads: the same ledger replays to the same θ and the same norms.


F32 = npt.NDArray[np.float32]

SLICE = 1 << 20  # elements, 4 MiB: some 100 µs of work for 3 µs of Python; part of what makes sums repeatable

DIGESTS = 1 << 64  # of a layer: the sum of its slices' modulo this
PUSH_DIGESTS = 1 << 53  # of a push: such an integer is exact in every message and file
LAYER_FACTOR = 0x9E3779B97F4A7C15  # odd, and without a pattern: equal layers in other places are another push

_NO_STEPS = np.zeros(0, np.float32)
_Result = TypeVar("_Result")
_Measured = tuple[float, float, int]  # Σd², Σd·acc and the digest of a slice


@dataclass(frozen=True, slots=True)
class Measures:
    """The result of one pass over a push, for each layer in the order of the layers."""

    squares: tuple[float, ...]  # Σd²
    products: tuple[float, ...]  # Σd·acc
    digests: tuple[int, ...]  # of θ_j

    def combine_digests(self, layers: Iterable[int]) -> int:
        """The digest of all layers, by their numbers; those of several slaves add up modulo PUSH_DIGESTS."""
        pairs = zip(layers, self.digests, strict=True)
        return sum(digest * (LAYER_FACTOR * (2 * layer + 1)) for layer, digest in pairs) % PUSH_DIGESTS


class Kernels(Protocol):
    """kernels.py or reference.py: each function takes flat arrays of one length."""

    def measure(self, theta: F32, theta_j: F32, acc: F32 | None, first: int) -> tuple[float, float, int]: ...

    def fold_first(self, theta: F32, theta_j: F32) -> float: ...

    def fold(self, acc: F32, theta: F32, theta_j: F32, weight: float) -> float: ...

    def apply(
        self,
        theta: F32,
        acc: F32,
        momentum: F32,
        scale: float,
        lr: float,
        numbers: Numbers,
        theta_next: F32,
        first: int,
    ) -> tuple[float, int]: ...

    def round_update(
        self, codec: Codec, theta: F32, theta_next: F32, momentum_next: F32, back: float, codes: Codes, steps: F32
    ) -> None: ...


class KernelPool:
    """Runs kernels over whole banks; `threads` is an executor of `workers` threads, None computes in the caller's."""

    def __init__(
        self, kernels: Kernels, threads: Executor | None = None, workers: int = 1, meter: WorkMeter | None = None
    ) -> None:
        self._kernels = kernels
        self._meter = meter or WorkMeter()
        self._threads = threads
        self._workers = workers

    def measure(self, theta: Arrays, theta_j: Arrays, acc: Arrays | None = None) -> Measures:
        """Measure a push against θ, and beside what is folded so far; None: nothing is."""
        kernel = self._kernels.measure

        def measure_slice(i: int, cut: slice) -> _Measured:
            return kernel(theta[i][cut], theta_j[i][cut], None if acc is None else acc[i][cut], cut.start)

        return _add_up(self._map_slices(theta, measure_slice))

    def fold_first(self, theta: Arrays, theta_j: Arrays, weights: Mapping[int, float]) -> tuple[float, ...]:
        """Turn θ_j into acc = θ − θ_j, or 0 in a layer that weighs 0; return Σ acc² of each layer."""
        kernel = self._kernels.fold_first

        def fold_slice(i: int, cut: slice) -> float:
            if weights[i] == 0.0:
                theta_j[i][cut] = 0.0
                return 0.0
            return kernel(theta[i][cut], theta_j[i][cut])

        return tuple(map(_ordered_sum, self._map_slices(theta, fold_slice)))

    def fold(self, acc: Arrays, theta: Arrays, theta_j: Arrays, weights: Mapping[int, float]) -> tuple[float, ...]:
        """Add w·(θ − θ_j) to acc, with each layer's weight; return Σ acc² of each layer."""
        kernel = self._kernels.fold

        def fold_slice(i: int, cut: slice) -> float:
            return kernel(acc[i][cut], theta[i][cut], theta_j[i][cut], weights[i])

        return tuple(map(_ordered_sum, self._map_slices(theta, fold_slice)))

    def apply(
        self,
        theta: Arrays,
        acc: Arrays,
        momentum: Arrays,
        steps: Mapping[int, OuterStep],
        theta_next: Arrays,
    ) -> Measures:
        """Take each layer's outer step, whose scale is one number: θ′ into `theta_next`, m′ into `acc`.

        Return what a push that is θ′ would be measured as.
        """
        kernel = self._kernels.apply

        def apply_slice(i: int, cut: slice) -> _Measured:
            step, made = steps[i], theta_next[i][cut]
            t, sums, m = theta[i][cut], acc[i][cut], momentum[i][cut]
            square, digest = kernel(t, sums, m, step.scales[0], step.lr, step.numbers, made, cut.start)
            return square, 0.0, digest

        return _add_up(self._map_slices(theta, apply_slice))

    def round_update(
        self,
        codec: Codec,
        theta: Arrays,
        theta_next: Arrays,
        momentum: Arrays,
        back: Mapping[int, float],
        update: Update,
        at: Fields,
    ) -> None:
        """Make θ′ of what `codec` brings of it, and write that; of what is left over `back` of it goes into m′."""
        kernel = self._kernels.round_update
        blocks: dict[tuple[int, int], slice] = {}
        tasks = []
        for layer, cut, held in cut_parameters(at, SLICE):
            blocks[layer, cut.start] = held
            tasks.append((layer, cut))

        def round_slice(i: int, cut: slice) -> float:
            steps = update.steps[i][blocks[i, cut.start]] if update.steps else _NO_STEPS
            kernel(codec, theta[i][cut], theta_next[i][cut], momentum[i][cut], back[i], update.codes[i][cut], steps)
            return 0.0

        self._run_tasks(tasks, round_slice)

    def copy_theta(self, source: Arrays, target: Arrays) -> None:
        """Copy θ of a version to where a push's differences will be added to it."""

        def copy_slice(i: int, cut: slice) -> float:
            np.copyto(target[i][cut], source[i][cut])
            return 0.0

        self._map_slices(source, copy_slice)

    def _map_slices(self, arrays: Arrays, work: Callable[[int, slice], _Result]) -> list[list[_Result]]:
        """Do `work(layer, cut)` for every slice; return its results by layer and slice, in order."""
        tasks = [(i, slice(b, min(b + SLICE, a.size))) for i, a in arrays.items() for b in range(0, a.size, SLICE)]
        results = iter(self._run_tasks(tasks, work))
        return [[next(results) for _ in range(0, a.size, SLICE)] for a in arrays.values()]

    def _run_tasks(self, tasks: Sequence[tuple[int, slice]], work: Callable[[int, slice], _Result]) -> list[_Result]:
        def run_part(part: Sequence[tuple[int, slice]]) -> list[_Result]:
            return [done(layer, cut) for layer, cut in part]

        def done(layer: int, cut: slice) -> _Result:
            result = work(layer, cut)
            self._meter.add(BYTES * (cut.stop - cut.start))
            return result

        if self._threads is None or len(tasks) < 2:
            return run_part(tasks)
        size = -(-len(tasks) // self._workers)
        parts = [tasks[i : i + size] for i in range(0, len(tasks), size)]
        return [result for part in self._threads.map(run_part, parts) for result in part]


def _add_up(slices: Sequence[Sequence[_Measured]]) -> Measures:
    """Add up the measurements of slices, layer by layer."""
    squares = tuple(_ordered_sum([square for square, _, _ in layer]) for layer in slices)
    products = tuple(_ordered_sum([product for _, product, _ in layer]) for layer in slices)
    return Measures(squares, products, tuple(sum(digest for _, _, digest in layer) % DIGESTS for layer in slices))


def _ordered_sum(values: Sequence[float]) -> float:
    """Add from left to right; the built-in sum rounds otherwise from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
