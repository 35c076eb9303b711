"""Paired comparisons: the same seed in two rows starts from the same θ and draws the same batches.

"No worse by x" means the upper end of the paired 95 % interval of the relative difference (Student's t).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from statistics import mean, stdev

# Quantile 0.975 of Student's t by degrees of freedom; others use the next smaller entry, which is conservative.
STUDENT = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179,
    15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """The relative difference of a row's losses to another's: the mean and its 95 % interval, as shares of the
    other's.
    """

    seeds: int
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.seeds < 2:
            return "one seed: no interval"
        if self.high < 0:
            return "better"
        return "worse" if self.low > 0 else f"no worse by {self.high:.1%}"

    def __str__(self) -> str:
        if self.seeds < 2:
            return f"{self.mean:+.1%}, {self.verdict}"
        return f"{self.mean:+.1%} ({self.low:+.1%} to {self.high:+.1%}, {self.seeds} paired seeds): {self.verdict}"


def compare_paired(losses: Mapping[int, float], others: Mapping[int, float]) -> Comparison | None:
    """Compare losses by seed; None if there is no common seed."""
    shares = [losses[seed] / others[seed] - 1.0 for seed in sorted(losses.keys() & others.keys())]
    if not shares:
        return None
    if len(shares) == 1:
        return Comparison(1, shares[0], -inf, inf)
    half = student_quantile(len(shares) - 1) * stdev(shares) / sqrt(len(shares))
    return Comparison(len(shares), mean(shares), mean(shares) - half, mean(shares) + half)


def student_quantile(freedom: int) -> float:
    return STUDENT[max(n for n in STUDENT if n <= freedom)]
