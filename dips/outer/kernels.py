"""The kernels of the outer step, compiled: plain functions over flat fp32 arrays that release the GIL.

What must stay true: element-wise results have the bits of reference.py, so they are compiled without fastmath (a fused
multiply-add would round once less). Sums are inner functions that index from 0 (with an offset numba's wrap-around of
negative indices turns the loop into gathers: 12 GB/s instead of 41) and may be reassociated, but never run under
`fastmath=True`, which deletes the check for NaN and infinity. Sums are kept in fp64: a finite sum is a finite push.

It knows one array at a time; kernel_pool.py spreads layers over threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from dips.codecs import Codec
from dips.outer import reference
from dips.outer.reference import SUMMED
from dips.outer_step import Numbers, nesterov_numbers
from dips.quantisers import Codes

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
_Function = TypeVar("_Function", bound=Callable[..., Any])

BLOCK = SUMMED  # elements, 16 KiB: what fold has written is still in the L1 cache when its squares are summed
_SUMS = {"reassoc", "contract", "nsz"}
_INT8_BLOCK, _INT8_LARGEST = Codec.INT8.block, np.float32(Codec.INT8.largest)
_HALF, _BITS = np.uint32(0xFFFF), np.uint32(16)


def _compile_nogil(**flags: Any) -> Callable[[_Function], _Function]:
    """Compile without the GIL; kept in NUMBA_CACHE_DIR or beside this file, not at all where neither can be written."""

    def compile_function(function: _Function) -> _Function:
        try:
            made: _Function = numba.njit(nogil=True, cache=True, **flags)(function)
        except RuntimeError:  # numba's word for "no place to cache": a read-only root without NUMBA_CACHE_DIR
            made = numba.njit(nogil=True, **flags)(function)
        return made

    return compile_function


@_compile_nogil(fastmath=_SUMS)
def _sum_sq(a: F32) -> float:
    total = 0.0
    for i in range(a.size):
        x = np.float64(a[i])
        total += x * x
    return total


# The digest is summed in halves of 16 bits: 32-bit lanes keep up with memory where 64-bit ones take a fifth of it. A
# block's halves add up to less than 2³², for it has no more than 65,536 elements.


@_compile_nogil(fastmath=_SUMS)
def _measure_block(a: F32, b: F32, bits: U32) -> tuple[float, np.uint64]:
    total, low, high = 0.0, np.uint32(0), np.uint32(0)
    for i in range(a.size):
        x = np.float64(a[i] - b[i])
        total += x * x
        low = np.uint32(low + (bits[i] & _HALF))
        high = np.uint32(high + (bits[i] >> _BITS))
    return total, np.uint64(low) + (np.uint64(high) << np.uint64(_BITS))


@_compile_nogil(fastmath=_SUMS)
def _measure_block_beside(a: F32, b: F32, acc: F32, bits: U32) -> tuple[float, float, np.uint64]:
    total, dot, low, high = 0.0, 0.0, np.uint32(0), np.uint32(0)
    for i in range(a.size):
        x = np.float64(a[i] - b[i])
        total += x * x
        dot += x * np.float64(acc[i])
        low = np.uint32(low + (bits[i] & _HALF))
        high = np.uint32(high + (bits[i] >> _BITS))
    return total, dot, np.uint64(low) + (np.uint64(high) << np.uint64(_BITS))


@_compile_nogil()
def _measure_loop(theta: F32, theta_j: F32, bits: U32, first: int) -> tuple[float, np.uint64]:
    total, digest = 0.0, np.uint64(0)
    for begin in range(0, theta.size, BLOCK):
        end = min(begin + BLOCK, theta.size)
        part, digits = _measure_block(theta[begin:end], theta_j[begin:end], bits[begin:end])
        total += part
        digest += digits * np.uint64(2 * (first + begin) + 1)
    return total, digest


@_compile_nogil()
def _measure_beside_loop(theta: F32, theta_j: F32, acc: F32, bits: U32, first: int) -> tuple[float, float, np.uint64]:
    total, dot, digest = 0.0, 0.0, np.uint64(0)
    for begin in range(0, theta.size, BLOCK):
        end = min(begin + BLOCK, theta.size)
        part, product, digits = _measure_block_beside(
            theta[begin:end], theta_j[begin:end], acc[begin:end], bits[begin:end]
        )
        total += part
        dot += product
        digest += digits * np.uint64(2 * (first + begin) + 1)
    return total, dot, digest


@_compile_nogil()
def _subtract_into(a: F32, b: F32) -> None:
    for i in range(a.size):
        b[i] = a[i] - b[i]


@_compile_nogil()
def _add_scaled_difference(acc: F32, a: F32, b: F32, weight: np.float32) -> None:
    for i in range(a.size):
        acc[i] = acc[i] + weight * (a[i] - b[i])


@_compile_nogil()
def _fold_first(theta: F32, theta_j: F32) -> float:
    total = 0.0
    for begin in range(0, theta.size, BLOCK):
        end = min(begin + BLOCK, theta.size)
        _subtract_into(theta[begin:end], theta_j[begin:end])
        total += _sum_sq(theta_j[begin:end])
    return total


@_compile_nogil()
def _fold_loop(acc: F32, theta: F32, theta_j: F32, weight: np.float32) -> float:
    total = 0.0
    for begin in range(0, theta.size, BLOCK):
        end = min(begin + BLOCK, theta.size)
        _add_scaled_difference(acc[begin:end], theta[begin:end], theta_j[begin:end], weight)
        total += _sum_sq(acc[begin:end])
    return total


@_compile_nogil()
def _apply_loop(
    theta: F32, acc: F32, momentum: F32, scale: Any, lr: Any, a: Any, b: Any, c: Any, e: Any, theta_next: F32
) -> None:
    for i in range(theta.size):
        g = scale * acc[i]
        m = a * momentum[i] + b * g
        acc[i] = m
        theta_next[i] = theta[i] - lr * (c * g + e * m)


@_compile_nogil()
def _apply_measured(
    theta: F32, acc: F32, momentum: F32, scale: Any, lr: Any, a: Any, b: Any, c: Any, e: Any, theta_next: F32,
    bits: U32, first: int,
) -> tuple[float, np.uint64]:  # fmt: skip
    total, digest = 0.0, np.uint64(0)
    for begin in range(0, theta.size, BLOCK):
        end = min(begin + BLOCK, theta.size)
        made = theta_next[begin:end]
        _apply_loop(theta[begin:end], acc[begin:end], momentum[begin:end], scale, lr, a, b, c, e, made)
        part, digits = _measure_block(theta[begin:end], made, bits[begin:end])
        total += part
        digest += digits * np.uint64(2 * (first + begin) + 1)
    return total, digest


@_compile_nogil(fastmath={"nnan", "nsz"})
def _largest_change(a: F32, b: F32) -> np.float32:
    top = np.float32(0)
    for i in range(a.size):
        top = max(top, abs(b[i] - a[i]))
    return top


@_compile_nogil(fastmath=_SUMS)
def _zero_if_finite(a: F32, b: F32) -> np.float32:
    total = np.float32(0)
    for i in range(a.size):
        total += (b[i] - a[i]) * np.float32(0)
    return total


@_compile_nogil()
def _round_block(
    theta: F32, theta_next: F32, momentum: F32, back: np.float32, codes: npt.NDArray[np.int8], step: np.float32
) -> None:
    inverse = np.float32(1) / step if step > 0 else np.float32(0)
    for i in range(theta.size):
        target = theta_next[i]
        code = np.int8(np.int32(np.rint((target - theta[i]) * inverse)))
        made = theta[i] + np.float32(code) * step
        momentum[i] = momentum[i] - back * (target - made)
        theta_next[i] = made
        codes[i] = code


@_compile_nogil()
def _round_loop(
    theta: F32, theta_next: F32, momentum: F32, back: np.float32, codes: npt.NDArray[np.int8], steps: F32, tiniest: Any
) -> None:
    for block in range(steps.size):
        begin = block * _INT8_BLOCK
        end = min(begin + _INT8_BLOCK, theta.size)
        top = _largest_change(theta[begin:end], theta_next[begin:end])
        step = top / _INT8_LARGEST if top >= tiniest else np.float32(0)
        if _zero_if_finite(theta[begin:end], theta_next[begin:end]) != 0:  # NaN is not 0 either
            step = np.float32(np.nan)
        steps[block] = step
        _round_block(theta[begin:end], theta_next[begin:end], momentum[begin:end], back, codes[begin:end], steps[block])


def measure(theta: F32, theta_j: F32, acc: F32 | None = None, first: int = 0) -> tuple[float, float, int]:
    """Return (Σd², Σd·acc, digest) of a push in one layer or slice: d = θ − θ_j, its product with the round's sum.

    theta    f32[n]  in  global parameters at the present version
    theta_j  f32[n]  in  the cluster's parameters, as staged
    acc      f32[n]  in  Σ w·(θ − θ_j) of the pushes folded so far; None: none is, and the product is 0
    first    ≥ 0         number of the slice's first element in its layer, a multiple of BLOCK: so digests of slices
                         add up to the layer's

    The digest is Σ bits(θ_j[i])·(2b + 1) modulo 2⁶⁴, b being the number of the first element of i's block. Equal
    digests show that a push was sent twice. An honest repetition needs no position within a block; the digest does not
    stop a forger.

    Cost    reads 2n floats, or 3n, allocates nothing.
    Errors  none: Σd² is NaN or infinite exactly if a difference is; equal lengths are the caller's promise.
    Source  Di-PS §4.1, step 1.
    """
    bits = theta_j.view(np.uint32)
    if acc is None:
        total, digest = _measure_loop(theta, theta_j, bits, first)
        return total, 0.0, int(digest)
    total, dot, digest = _measure_beside_loop(theta, theta_j, acc, bits, first)
    return total, dot, int(digest)


def fold_first(theta: F32, theta_j: F32) -> float:
    """Turn the first accepted push of a round into the running sum, in its own buffer; return its squared norm.

    theta    f32[n]  in      global parameters at the version being left
    theta_j  f32[n]  in/out  the cluster's parameters; afterwards acc = θ − θ_j

    Cost    reads 2n floats, writes n, allocates nothing.
    Errors  none; equal lengths and finite values are the caller's promise.
    Source  Di-PS §4.1, step 3.
    """
    return _fold_first(theta, theta_j)


def fold(acc: F32, theta: F32, theta_j: F32, weight: float) -> float:
    """Add one accepted push to the running sum of pseudo-gradients; return the sum's squared norm.

    acc      f32[n]  in/out  Σ w·(θ − θ_j) of the pushes folded so far
    theta    f32[n]  in      global parameters at the version being left
    theta_j  f32[n]  in      the cluster's parameters, as staged and measured
    weight   ≥ 0             over that of the first push that counts in this layer

    Cost    reads 3n floats, writes n, allocates nothing.
    Errors  none; equal lengths and finite values are the caller's promise.
    Source  Di-PS §4.1, step 3.
    """
    return _fold_loop(acc, theta, theta_j, np.float32(weight))


def apply(
    theta: F32, acc: F32, momentum: F32, scale: float, lr: float, numbers: Numbers, theta_next: F32, first: int = 0
) -> tuple[float, int]:
    """Take the outer step of any rule: g = scale·acc; m′ = a·m + b·g; θ′ = θ − lr·(c·g + e·m′).

    Return (Σ(θ − θ′)², digest of θ′), as `measure` would.

    theta       f32[n]  in      θ of the version being left
    acc         f32[n]  in/out  Σ w·(θ − θ_j); afterwards m′
    momentum    f32[n]  in      m of the version being left
    scale       ≥ 0             averages and clips
    numbers     a, b, c and e   Nesterov's are μ, 1, 1, μ: to multiply by 1 rounds nothing
    theta_next  f32[n]  out     θ′
    first       ≥ 0             as in `measure`

    Cost    reads 3n floats, writes 2n, allocates nothing; it measures what is in the cache.
    Errors  none; equal lengths are the caller's promise.
    Source  Di-PS §4.1, steps 4 and 5; Algorithm 1, line 14.
    """
    a, b, c, e = map(np.float32, numbers)
    scale_, lr_, bits = np.float32(scale), np.float32(lr), theta_next.view(np.uint32)
    total, digest = _apply_measured(theta, acc, momentum, scale_, lr_, a, b, c, e, theta_next, bits, first)
    return total, int(digest)


def round_update(
    codec: Codec, theta: F32, theta_next: F32, momentum_next: F32, back: float, codes: Codes, steps: F32
) -> None:
    """Make θ′ of what an update brings; what that leaves over goes into m′, to come back in later steps.

    theta          f32[n]  in      θ of the version being left, one parameter of it or a slice from a block's begin
    theta_next     f32[n]  in/out  θ′ of `apply`; afterwards θ + codes·steps, in one fp32 addition
    momentum_next  f32[n]  in/out  m′ −= back·(θ′ of `apply` − θ′)
    back           ≥ 0             outer_step.returned_share
    codes          n of the codec  out
    steps          f32[blocks]     out   of each block, its largest |change| / codec.largest; NaN if one is not finite

    Cost    int8, compiled: reads 5n floats, writes 2n and n bytes, allocates nothing. Others are the reference:
            passes over spans in the cache.
    Errors  none; equal lengths are the caller's promise.
    """
    if codec is Codec.INT8:
        _round_loop(theta, theta_next, momentum_next, np.float32(back), codes, steps, np.float32(codec.tiniest))
    else:
        reference.round_update(codec, theta, theta_next, momentum_next, back, codes, steps)


def warm_up() -> None:
    """Compile every kernel now (seconds; milliseconds from the cache), so that no order pays for it."""
    try:
        _call_all()
    except Exception:  # numba believes its cache, which it does not sync: a power cut leaves half of it
        kept: Any = _fold_loop
        if kept.stats.cache_path is None:
            raise
        for index in Path(kept.stats.cache_path).glob("kernels.*.nbi"):
            index.unlink(missing_ok=True)
        _call_all()


def _call_all() -> None:
    a, b, c, d = (np.zeros(8, dtype=np.float32) for _ in range(4))
    measure(a, b)
    measure(a, b, c)
    fold_first(a, b)
    fold(b, a, c, 1.0)
    apply(a, b, c, 1.0, 0.7, nesterov_numbers(0.8), d)
    round_update(Codec.INT8, a, d, b, 1.0, np.zeros(8, np.int8), c[:1])
