"""The weight of a push among those of its round: `outer.weights`.

A script reports how many tokens it trained on. In weights and in the run's progress a push counts for at most
MOST_TIMES the usual tokens of the cluster with the largest usual pushes, so that a cluster that counts wrongly, or
lies, neither determines θ alone nor ends the run. Limits: nothing is usual until some cluster has TOKENS_KEPT pushes;
and a cluster that goes on claiming more is believed more, MOST_TIMES as much every third push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low

from dips.protocol.enums import WeightRule

TOKENS_KEPT = 5  # last pushes of a cluster, whose median is usual
MOST_TIMES = 16  # a cluster that was cut off, or has grown, brings more at once


def weigh_tokens(tokens: int) -> float:
    """Weigh a push by its tokens (Di-PS §4.1)."""
    return float(tokens)


def weigh_alike(tokens: int) -> float:
    """Weigh all pushes alike (DiLoCo)."""
    return 1.0


WEIGHTS: Mapping[WeightRule, Callable[[int], float]] = {
    WeightRule.TOKENS: weigh_tokens,
    WeightRule.UNIFORM: weigh_alike,
}


def most_tokens(usual: Iterable[Sequence[int]]) -> int | None:
    """Return how many tokens of a push count at most, from the counted tokens of each cluster's last ones; None: any
    number.
    """
    medians = [median_low(tokens) for tokens in usual if len(tokens) >= TOKENS_KEPT]
    return MOST_TIMES * max(medians) if medians else None
