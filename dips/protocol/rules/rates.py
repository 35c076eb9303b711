"""The outer learning rate, `outer.lr`: a number, or `auto`, computed from the number of clusters."""

from __future__ import annotations

from math import log2

# Best outer learning rates of DiLoCo's scaling laws (Charles et al. 2025), by log2 of the clusters.
BEST_RATES = (0.4, 0.6, 0.6, 0.8)  # for 1, 2, 4 and 8


def rate_of_clusters(clusters: int) -> float:
    """Return the best rate for this many clusters: interpolated in the table along log2, constant beyond its end."""
    at = min(log2(max(1, clusters)), len(BEST_RATES) - 1.0)
    below = min(int(at), len(BEST_RATES) - 2)
    return BEST_RATES[below] + (at - below) * (BEST_RATES[below + 1] - BEST_RATES[below])
