"""The compiled kernels beside their NumPy reference, plain formulas, and NaN."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import dips.outer
from dips.outer import kernel_pool as kernel_pool_module
from dips.outer import kernels, reference
from dips.outer.kernel_pool import KernelPool, Kernels, WorkMeter
from dips.outer_step import nesterov_numbers, nesterov_step

BOTH = pytest.mark.parametrize("k", [kernels, reference], ids=["compiled", "reference"])
SIZES = (1, 3, 17, kernels.BLOCK, 3 * kernels.BLOCK + 5)


def arrays(n: int, count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(n) * 10.0 ** rng.integers(-4, 4, n)).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("n", SIZES)
def test_elementwise_results_have_the_same_bits_as_the_twins(n: int) -> None:
    """acc, m′ and θ′ of the compiled kernels equal the reference's bit for bit: no fused multiply-add, no fp64."""
    results = []
    for k in (kernels, reference):
        theta, acc, theta_j, m = arrays(n, 4)
        theta_next = np.empty_like(theta)
        k.fold_first(theta, acc)
        first = acc.copy()
        k.fold(acc, theta, theta_j, 0.3)
        folded = acc.copy()
        measured = k.apply(theta, acc, m, 0.123, 0.7, nesterov_numbers(0.8), theta_next, kernels.BLOCK)
        results.append((first, folded, acc, theta_next))
        square, _, digest = k.measure(theta, theta_next, None, kernels.BLOCK)
        assert measured == (square, digest), "of θ′, as of a push"
    for compiled, expected in zip(*results, strict=True):
        assert compiled.tobytes() == expected.tobytes()


@BOTH
@pytest.mark.parametrize("n", SIZES)
def test_sums_agree_with_the_plain_formula(k: Kernels, n: int) -> None:
    """Σ(θ − θ_j)² and Σ acc² equal the fp64 sum over the fp32 differences, to fp64 rounding."""
    theta, theta_j, other = arrays(n, 3)
    expected = float(np.sum((theta - theta_j).astype(np.float64) ** 2))
    assert k.measure(theta, theta_j)[:2] == pytest.approx((expected, 0.0), rel=1e-12)
    dot = float(np.sum((theta - theta_j).astype(np.float64) * other))
    scale = float(np.sum(np.abs((theta - theta_j).astype(np.float64) * other)))
    assert k.measure(theta, theta_j, other)[:2] == pytest.approx((expected, dot), rel=1e-12, abs=1e-12 * scale)
    acc = theta_j.copy()
    assert k.fold_first(theta, acc) == pytest.approx(expected, rel=1e-12)
    acc_sq = k.fold(acc, theta, other, 2.5)
    assert acc_sq == pytest.approx(float(np.sum(acc.astype(np.float64) ** 2)), rel=1e-12)


@BOTH
def test_apply_is_nesterov(k: Kernels) -> None:
    """θ′ = θ − lr·(g + μ·m′) with g = scale·acc and m′ = μ·m + g; θ and m stay as they are."""
    theta, acc, m = (np.array(v, dtype=np.float32) for v in ([1.0, 2.0], [0.5, -1.0], [0.25, 0.0]))
    theta_next = np.empty_like(theta)
    k.apply(theta, acc, m, 2.0, 0.5, nesterov_numbers(0.5), theta_next)
    np.testing.assert_array_equal(acc, [1.125, -2.0])
    np.testing.assert_array_equal(theta_next, [1.0 - 0.5 * (1.0 + 0.5625), 2.0 - 0.5 * (-2.0 - 1.0)])
    np.testing.assert_array_equal(theta, [1.0, 2.0])
    np.testing.assert_array_equal(m, [0.25, 0.0])


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1, 5000, 9999])
def test_one_bad_element_makes_the_sum_not_finite(k: Kernels, bad: float, at: int) -> None:
    """A NaN or infinity anywhere is seen by measure (guards invariant 8)."""
    theta, theta_j = arrays(10_000, 2)
    assert np.isfinite(k.measure(theta, theta_j)[0])
    theta_j[at] = bad
    assert not np.isfinite(k.measure(theta, theta_j)[0])
    assert not np.isfinite(k.measure(theta, theta_j, theta)[0])


@BOTH
@pytest.mark.parametrize("n", SIZES)
def test_a_digest_is_the_plain_sum_in_any_slices(k: Kernels, n: int) -> None:
    """Σ bits(θ_j[i])·(2b + 1) modulo 2⁶⁴, whole or of slices, with acc or without; one other bit, another digest."""
    theta, theta_j = arrays(n, 2, seed=5)
    block = kernels.BLOCK
    expected = sum(int(b) * (2 * (i - i % block) + 1) for i, b in enumerate(theta_j.view(np.uint32))) % 2**64
    half = n // 2 // block * block
    begun, ended = k.measure(theta[:half], theta_j[:half], None, 0), k.measure(theta[half:], theta_j[half:], None, half)
    assert k.measure(theta, theta_j)[2] == k.measure(theta, theta_j, theta)[2] == expected
    assert (begun[2] + ended[2]) % 2**64 == expected
    theta_j.view(np.uint32)[half] ^= 1
    assert k.measure(theta, theta_j)[2] != expected


@BOTH
def test_large_finite_differences_stay_finite(k: Kernels) -> None:
    """Squares that fp32 cannot hold are no infinity: sums are kept in fp64."""
    theta, theta_j = np.zeros(5000, dtype=np.float32), np.full(5000, 1e30, dtype=np.float32)
    assert k.measure(theta, theta_j)[0] == pytest.approx(5000 * 1e60, rel=1e-6)


def run_kernel_pool(pool: KernelPool, seed: int) -> tuple[bytes, ...]:
    sizes = {0: 5, 1: 70_001, 2: 1, 3: 12_345}
    banks = [{i: arrays(n, 1, seed + b * 10 + i)[0] for i, n in sizes.items()} for b in range(5)]
    theta, acc, theta_j, m, theta_next = banks
    norms = (
        *pool.measure(theta, theta_j).squares,
        *(found := pool.measure(theta, theta_j, m)).squares,
        *found.products,
        float(found.combine_digests(theta)),
        *pool.fold_first(theta, acc, dict.fromkeys(sizes, 1.0)),
        *pool.fold(acc, theta, theta_j, {i: 0.7 + i for i in sizes}),
    )
    made = pool.apply(theta, acc, m, dict.fromkeys(sizes, nesterov_step(0.01, 0.7, 0.8)), theta_next)
    assert made == pool.measure(theta, theta_next)
    arrays_out = [bank[i].tobytes() for bank in (acc, theta_next) for i in sizes]
    return (np.array(norms).tobytes(), *arrays_out)


def test_any_number_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, acc and θ′ do not depend on the number of threads: the same ledger replays bit for bit."""
    monkeypatch.setattr(kernel_pool_module, "SLICE", 1000)
    alone = run_kernel_pool(KernelPool(kernels), seed=3)
    for workers in (1, 2, 3, 7):
        with ThreadPoolExecutor(workers) as threads:
            assert run_kernel_pool(KernelPool(kernels, threads, workers), seed=3) == alone


def test_two_slices_are_worked_through_side_by_side_and_counted() -> None:
    """A layer each, on two threads; what lasts minutes is told from what hangs by the bytes."""

    class Parts(ThreadPoolExecutor):
        def map(self, work: Any, parts: Any) -> Any:  # type: ignore[override]
            self.parts = list(parts)
            return super().map(work, self.parts)

    source, target = ({0: np.full(5, value, np.float32), 1: np.full(3, value, np.float32)} for value in (7.0, 0.0))
    meter = WorkMeter()
    with Parts(2) as threads:
        KernelPool(reference, threads, 2, meter).copy_theta(source, target)
        assert [len(part) for part in threads.parts] == [1, 1]
    assert meter.nbytes == 8 * 4 and all((target[i] == 7.0).all() for i in source)


def test_measure_tells_layers_apart() -> None:
    """Each layer has its own sum, in the order of the layers; an empty layer has none to add."""
    theta = {7: np.ones(4, np.float32), 2: np.zeros(3, np.float32), 5: np.zeros(0, np.float32)}
    theta_j = {7: np.zeros(4, np.float32), 2: np.full(3, 2, np.float32), 5: np.zeros(0, np.float32)}
    assert KernelPool(kernels).measure(theta, theta_j).squares == (4.0, 12.0, 0.0)
    found = KernelPool(kernels).measure(theta, theta_j, theta)
    assert found.products == (4.0, 0.0, 0.0)
    swapped = KernelPool(kernels).measure({7: theta[2], 2: theta[7]}, {7: theta_j[2], 2: theta_j[7]})
    assert found.combine_digests(theta) != swapped.combine_digests((7, 2)) and found.combine_digests(theta) < 2**53


def test_no_fastmath_true_anywhere() -> None:
    """`fastmath=True` deletes the check for NaN, so the word stands in no line of code (docs/rationale.md#11)."""
    for path in Path(dips.outer.__path__[0]).rglob("*.py"):
        code = [line for line in path.read_text().splitlines() if "`fastmath=True`" not in line]
        assert not any("fastmath=True" in line.replace(" ", "") for line in code), path


def test_a_cache_that_is_cut_short_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a power cut a slave ended at each start with `pickle data was truncated`. What fails again is raised."""
    index, other = tmp_path / "kernels._fold_loop-1.py311.nbi", tmp_path / "other._f-1.py311.nbi"
    index.touch(), other.touch()
    called = Mock(
        side_effect=[UnpicklingError("pickle data was truncated"), None, EOFError, EOFError("twice"), EOFError]
    )
    monkeypatch.setattr(kernels, "_call_all", called)
    monkeypatch.setattr(kernels, "_fold_loop", cached := Mock())
    cached.stats.cache_path = str(tmp_path)
    kernels.warm_up()
    assert called.call_count == 2 and other.exists() and not index.exists()
    with pytest.raises(EOFError, match="twice"):
        kernels.warm_up()
    cached.stats.cache_path = None
    with pytest.raises(EOFError):
        kernels.warm_up()


def test_warm_up_compiles_every_kernel() -> None:
    """After warm_up no kernel is compiled again for the arrays of a slave."""
    kernels.warm_up()
    compiled = [
        kernels._measure_loop,
        kernels._measure_beside_loop,
        kernels._fold_first,
        kernels._fold_loop,
        kernels._apply_measured,
    ]
    before = [len(f.signatures) for f in compiled]
    theta, acc, theta_j, m = arrays(100, 4)
    theta_view = theta[3:50]
    kernels.measure(theta_view, theta_j[3:50])
    kernels.measure(theta_view, theta_j[3:50], acc[3:50], 3)
    kernels.fold_first(theta, acc)
    kernels.fold(acc, theta, theta_j, 1)
    kernels.apply(theta, acc, m, 0.5, 0.7, nesterov_numbers(0.8), np.empty_like(theta))
    assert [len(f.signatures) for f in compiled] == before
    assert min(before) >= 1
