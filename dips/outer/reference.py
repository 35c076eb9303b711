"""The kernels of the outer step in plain NumPy: what kernels.py must equal, and what the simulation runs on.

Element-wise results (acc, m′, θ′) have the same bits as the compiled ones: the same fp32 operations in the same order,
no fused multiply-add. Sums of squares agree to rounding only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dips.codecs import Codec
from dips.outer_step import Numbers
from dips.quantisers import SPAN, Codes, add_codes, quantise

F32 = npt.NDArray[np.float32]

SUMMED = 4096  # elements that one factor of a digest is for


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


def round_update(
    codec: Codec, theta: F32, theta_next: F32, momentum_next: F32, back: float, codes: Codes, steps: F32
) -> None:
    """Make θ′ of what an update brings, θ + the change as `codec` has it; m′ takes `back` of what that leaves over.

    theta          f32[n]        in      one parameter of θ, or a slice from a block's begin
    theta_next     f32[n]        in/out  θ′ of `apply`; afterwards what a rank makes of θ and the update
    momentum_next  f32[n]        in/out  m′ −= back·(θ′ of `apply` − θ′)
    codes, steps                 out     as of quantisers.quantise
    """
    block = codec.block or SPAN
    with np.errstate(all="ignore"):
        for begin in range(0, theta.size, SPAN):
            cut, blocks = slice(begin, begin + SPAN), slice(begin // block, (begin + SPAN) // block)
            made = theta[cut].copy()
            quantise(codec, theta_next[cut] - made, steps[blocks], codes[cut])
            add_codes(codec, codes[cut], steps[blocks], made)
            momentum_next[cut] -= np.float32(back) * (theta_next[cut] - made)
            theta_next[cut] = made


def _sum_sq(a: F32) -> float:
    wide = a.astype(np.float64)
    return float(np.dot(wide, wide))
