"""The kernels of the outer step in plain NumPy: what kernels.py must equal, and what the simulation runs on.

Element-wise results (acc, m′, θ′) have the same bits as the compiled ones: the same fp32 operations in the same order,
no fused multiply-add. Sums of squares agree to rounding only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def measure(theta: F32, theta_j: F32) -> float:
    """Return Σ(θ − θ_j)²; not finite if any element is not."""
    with np.errstate(all="ignore"):
        return _sum_sq(theta - theta_j)


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


def apply(theta: F32, acc: F32, momentum: F32, scale: float, lr: float, mu: float, theta_next: F32) -> None:
    """Take the Nesterov step: θ′ into `theta_next`, m′ into `acc`."""
    with np.errstate(all="ignore"):
        g = np.float32(scale) * acc
        acc[:] = np.float32(mu) * momentum + g
        theta_next[:] = theta - np.float32(lr) * (g + np.float32(mu) * acc)


def _sum_sq(a: F32) -> float:
    wide = a.astype(np.float64)
    return float(np.dot(wide, wide))
