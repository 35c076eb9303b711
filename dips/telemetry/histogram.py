"""Counts values by size, for Prometheus: how long waits and phases take, not only how long the last one took.

One thread counts; any may read, and may miss what is being counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

# Seconds. From a small model on one machine to an outer step of hours: a factor of about three.
PHASE_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
LAG_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of an event loop


class Histogram:
    """How many values there were up to each of some bounds."""

    def __init__(self, bounds: Sequence[float] = PHASE_S) -> None:
        self._bounds, self._counts, self._sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe_value(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def total(self) -> float:
        """Of all values."""
        return self._sum

    def list_buckets(self) -> list[tuple[str, float]]:
        """Upper bound and number of values up to it, as Prometheus wants them; the last bound is infinite."""
        return list(zip((*map(str, self._bounds), "+Inf"), map(float, accumulate(self._counts)), strict=True))
