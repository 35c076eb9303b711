"""Histograms for Prometheus: the distribution of waits and durations, not only the last value.

One thread observes values; any thread may read, and may miss one that is being added.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

# Seconds, by factors of about three: from a small model on one machine to an outer step of hours.
PHASE_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
LAG_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of an event loop


class Histogram:
    """Counts of values up to each of some bounds."""

    def __init__(self, bounds: Sequence[float] = PHASE_S) -> None:
        self._bounds, self._counts, self._sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe_value(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self._sum

    def list_buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) for Prometheus; the last bound is infinite."""
        return list(zip((*map(str, self._bounds), "+Inf"), map(float, accumulate(self._counts)), strict=True))
