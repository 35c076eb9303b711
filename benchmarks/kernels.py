"""The outer step's kernels on all cores, beside memcpy and the STREAM triad on the same threads in the same process.

Bytes are counted as STREAM counts them: what a kernel reads and writes in its arrays, nothing for the cache lines that
a write brings in. Every kernel goes through `dips.outer.kernel_pool`, as in a slave; the triad and memcpy go through
the same slices on the same threads. A value is a rate; the ratio is against the triad's.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numba
import numpy as np
import numpy.typing as npt

from benchmarks.harness import Bench, main
from dips.outer import kernels
from dips.outer.kernel_pool import KernelPool
from dips.outer.pool import BYTES, Arrays, Pool
from dips.outer_step import Numbers, nesterov_step

F32 = npt.NDArray[np.float32]
LAYERS = 16
CONTRIBUTIONS = (1, 2, 4, 8)
LEAST = 0.8
ALIKE = dict.fromkeys(range(LAYERS), 1.0)
STEPS = dict.fromkeys(range(LAYERS), nesterov_step(0.5, 0.7, 0.8))


@numba.njit(nogil=True)
def _triad(a: F32, b: F32, c: F32) -> None:
    s = np.float32(3.0)
    for i in range(a.size):
        a[i] = b[i] + s * c[i]


class Yardsticks:
    """Kernels of no meaning, so that the kernel_pool spreads memcpy and the triad as it spreads the real ones."""

    def measure(self, theta: F32, theta_j: F32, acc: F32 | None, first: int) -> tuple[float, float, int]:
        np.copyto(theta_j, theta)
        return 0.0, 0.0, 0

    def fold_first(self, theta: F32, theta_j: F32) -> float:
        return self.measure(theta, theta_j, None, 0)[0]

    def fold(self, acc: F32, theta: F32, theta_j: F32, weight: float) -> float:
        _triad(acc, theta, theta_j)
        return 0.0

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
    ) -> tuple[float, int]:
        _triad(theta_next, theta, momentum)
        return 0.0, 0

    round_update = staticmethod(kernels.round_update)  # nothing is like it


def measure(bench: Bench) -> None:
    """Time every kernel over one model's banks, in turn with the yardsticks."""
    numel = (1 << 22) if bench.quick else (1 << 26)  # parameters: 16 MiB a bank (quick), 256 MiB, far beyond caches
    workers = os.cpu_count() or 1
    pool = Pool(dict.fromkeys(range(LAYERS), numel // LAYERS), 5)
    for bank in pool.banks:
        for array in bank.arrays.values():
            array[:] = np.random.default_rng(bank.number).standard_normal(array.size, np.float32)
    kernels.warm_up()
    bank_bytes = float(BYTES * numel)
    with ThreadPoolExecutor(workers, "kernel") as threads:
        works = _works(KernelPool(kernels, threads, workers), KernelPool(Yardsticks(), threads, workers), pool)
        bench.say(f"{numel:,} parameters, {workers} threads: {', '.join(works)}")
        took = bench.together({name: work for name, (work, _) in works.items()}, runs=5 if bench.quick else 11)
    rates = {name: banks * bank_bytes / took[name] for name, (_, banks) in works.items()}
    memcpy, triad = rates.pop("memcpy"), rates.pop("triad")
    bench.row("memcpy", memcpy, "B/s")
    bench.row("triad", triad, "B/s")
    for name, rate in rates.items():
        bench.row(name, rate, "B/s", against="triad", of=triad, least=LEAST)
    for name, rate in rates.items():
        bench.row(f"{name} against memcpy", rate, "B/s", against="memcpy", of=memcpy, least=LEAST)
    bench.note("bytes as STREAM counts them: 4 for each element read or written, no write-allocate")
    bench.note(
        "banks moved: memcpy 2, triad 3, measure 2 or 3, fold of the first 3, fold 4, apply 5; fold k: k in turn"
    )


def triad_rate(numel: int = 1 << 25, runs: int = 7, pick: Callable[[list[float]], float] = statistics.median) -> float:
    """Bytes a second of the STREAM triad here, now, on all cores; `pick` chooses among the times of the runs."""
    workers = os.cpu_count() or 1
    pool = Pool(dict.fromkeys(range(LAYERS), numel // LAYERS), 3)
    a, b, c = (bank.arrays for bank in pool.banks)
    times = []
    with ThreadPoolExecutor(workers, "kernel") as threads:
        kernel_pool = KernelPool(Yardsticks(), threads, workers)
        for _ in range(runs):
            begun = time.perf_counter()
            kernel_pool.fold(a, b, c, ALIKE)
            times.append(time.perf_counter() - begun)
    return 3 * BYTES * numel / pick(times)


def _works(kernel_pool: KernelPool, plain: KernelPool, pool: Pool) -> dict[str, tuple[Callable[[], object], int]]:
    """What to time: name → (work, banks that it moves)."""
    theta, pushed, acc, momentum, theta_next = (bank.arrays for bank in pool.banks)
    works: dict[str, tuple[Callable[[], object], int]] = {
        "memcpy": (partial(plain.measure, theta, theta_next), 2),
        "triad": (partial(plain.fold, theta_next, theta, momentum, ALIKE), 3),
        "measure": (partial(kernel_pool.measure, theta, pushed), 2),
        "measure beside acc": (partial(kernel_pool.measure, theta, pushed, acc), 3),
    }
    for count in CONTRIBUTIONS:
        works[f"fold {count}"] = (partial(_folds, kernel_pool, acc, theta, pushed, count), 3 + 4 * (count - 1))
    works["apply"] = (partial(kernel_pool.apply, theta, acc, momentum, STEPS, theta_next), 5)
    return works


def _folds(kernel_pool: KernelPool, acc: Arrays, theta: Arrays, pushed: Arrays, count: int) -> None:
    """What a round of `count` contributions folds: the first in its own buffer, the others one after another."""
    kernel_pool.fold_first(theta, acc, ALIKE)
    for _ in range(count - 1):
        kernel_pool.fold(acc, theta, pushed, ALIKE)


if __name__ == "__main__":
    main("kernels", __doc__, measure)
