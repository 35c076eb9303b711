"""The correction of the penalty's σ for the number of pushes that it was computed from.

Its residuals are taken from a mean that contains them, of few pushes at first, and the next push is compared with that
mean, not with the true one. So σ is divided by its expectation for σ_true = 1, and widened to Student's quantile: a
score of 3 is then exceeded by 1.35 in 1,000 healthy pushes, after ten as after a thousand.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, sqrt

NORMAL_QUANTILE = 3.0  # where the widened σ has the same tail as a normal one: the paper's β
MEMORIES = 20.0  # in 1/α: after so many pushes the factor no longer changes
MOST_TERMS = 20_000  # pushes that are summed at most: an α of 1e-6 must not make a judgement slow


@lru_cache(maxsize=4096)
def spread_factor(n: int, alpha: float) -> float:
    """Return the factor on the σ of n pushes; 0 if they have no spread, as for one."""
    share, squares, of_mean = 0.0, 0.0, 1.0  # E[σ²], and Σ of its squared weights; variance of the mean
    for k in range(2, min(n, int(MEMORIES / alpha), MOST_TERMS) + 1):
        weight = max(alpha, 1.0 / k)
        residual = (1.0 - weight) ** 2 * (1.0 + of_mean)
        of_mean = weight**2 + (1.0 - weight) ** 2 * of_mean
        share = (1.0 - alpha) * share + alpha * residual
        squares = (1.0 - alpha) ** 2 * squares + (alpha * residual) ** 2
    if share <= 0.0:
        return 0.0
    freedom = share**2 / squares
    return sqrt((1.0 + of_mean) / share) * student_quantile(freedom) / NORMAL_QUANTILE


def student_quantile(freedom: float) -> float:
    """Return the quantile of Student's t with the tail of a normal at NORMAL_QUANTILE (Wallace 1959)."""
    z = NORMAL_QUANTILE * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    return sqrt(freedom * (exp(min(z * z / freedom, 50.0)) - 1.0))
