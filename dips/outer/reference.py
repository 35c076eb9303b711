"""The kernels of the outer step in plain NumPy: what kernels.py must equal, and what the simulation runs on.

Element-wise results (acc, m′, θ′) have the same bits as the compiled ones: the same fp32 operations in the same order,
no fused multiply-add. Sums of squares agree to rounding only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dips.outer_step import Numbers

F32 = npt.NDArray[np.float32]

BLOCK = 256  # elements of an update that share one fp32 step
SUMMED = 4096  # elements that one factor of a digest is for
TINIEST = np.float32(2.0**-119)  # a block of smaller changes is zeros: its step would not be a normal number
_SPAN = 64 * BLOCK  # elements done at once: what one pass writes the next reads in the cache


def measure(theta: F32, theta_j: F32, acc: F32 | None = None, first: int = 0) -> tuple[float, float, int]:
    """Return Σd², not finite if any element is not, Σd·acc and Σ bits(θ_j[i])·(2b + 1) modulo 2⁶⁴, for d = θ − θ_j.

    b is the number of the first element of i's block, of which `first` is one.
    """
    with np.errstate(all="ignore"):
        d = theta - theta_j
        dot = 0.0 if acc is None else float(np.dot(d.astype(np.float64), acc.astype(np.float64)))
        sums = np.add.reduceat(theta_j.view(np.uint32), range(0, theta.size, SUMMED), dtype=np.uint64)
        odd = 2 * np.arange(first, first + theta.size, SUMMED, dtype=np.uint64) + 1
        digest = np.sum(sums * odd, dtype=np.uint64)
        return _sum_sq(d), dot, int(digest)


def fold_first(theta: F32, theta_j: F32) -> float:
    """Turn the first push of a round into acc = θ − θ_j, in place; return Σ acc²."""
    with np.errstate(all="ignore"):
        np.subtract(theta, theta_j, out=theta_j)
        return _sum_sq(theta_j)


def fold(acc: F32, theta: F32, theta_j: F32, weight: float) -> float:
    """Add w·(θ − θ_j) to acc; return Σ acc²."""
    with np.errstate(all="ignore"):
        acc += np.float32(weight) * (theta - theta_j)
        return _sum_sq(acc)


def apply(
    theta: F32, acc: F32, momentum: F32, scale: float, lr: float, numbers: Numbers, theta_next: F32, first: int = 0
) -> tuple[float, int]:
    """Take the outer step: θ′ into `theta_next`, m′ into `acc`; return Σ(θ − θ′)² and the digest of θ′."""
    a, b, c, e = map(np.float32, numbers)
    with np.errstate(all="ignore"):
        g = np.float32(scale) * acc
        acc[:] = a * momentum + b * g
        theta_next[:] = theta - np.float32(lr) * (c * g + e * acc)
    square, _, digest = measure(theta, theta_next, None, first)
    return square, digest


def round_int8(
    theta: F32, theta_next: F32, momentum_next: F32, back: float, codes: npt.NDArray[np.int8], steps: F32
) -> None:
    """Make θ′ = θ + codes·steps; m′ takes what that leaves over."""
    with np.errstate(all="ignore"):
        for block in range(steps.size):
            cut = slice(block * BLOCK, (block + 1) * BLOCK)
            change = theta_next[cut] - theta[cut]
            top = np.abs(change).max()
            step = np.float32(0) if top < TINIEST else top / np.float32(127)
            steps[block] = step if np.isfinite(step) else np.nan
            np.copyto(codes[cut], np.rint(change * (np.float32(1) / step if step > 0 else step)), casting="unsafe")
            made = theta[cut] + codes[cut].astype(np.float32) * steps[block]
            momentum_next[cut] -= np.float32(back) * (theta_next[cut] - made)
            theta_next[cut] = made


def round_bf16(
    theta: F32, theta_next: F32, momentum_next: F32, back: float, codes: npt.NDArray[np.uint16], steps: F32
) -> None:
    """Make θ′ = θ + codes, read as bf16: to nearest, ties to even; m′ takes what that leaves over. No steps."""
    with np.errstate(all="ignore"):
        for begin in range(0, theta.size, _SPAN):
            cut = slice(begin, begin + _SPAN)
            change = theta_next[cut] - theta[cut]
            bits = change.view(np.uint32)
            codes[cut] = np.where(np.isnan(change), np.uint32(0x7FC0), (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
            made = theta[cut] + (codes[cut].astype(np.uint32) << 16).view(np.float32)
            momentum_next[cut] -= np.float32(back) * (theta_next[cut] - made)
            theta_next[cut] = made


def _sum_sq(a: F32) -> float:
    wide = a.astype(np.float64)
    return float(np.dot(wide, wide))
