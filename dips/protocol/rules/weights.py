"""What a push weighs among those of its round: `outer.weights`.

A script says how many tokens it trained on. No more of them count, in weights and in the run's progress, than
MOST_TIMES what the cluster that brings most usually brings: so one that counts wrongly, or lies, neither makes θ alone
nor ends the run. Limits: until some cluster has brought TOKENS_KEPT pushes nothing is usual; and who goes on claiming
more is believed more, MOST_TIMES as much every third push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low

from dips.protocol.enums import WeightRule

TOKENS_KEPT = 5  # of a cluster's last pushes, whose median is usual
MOST_TIMES = 16  # a cluster that was cut off, or has grown, brings more at once


def weigh_tokens(tokens: int) -> float:
    """Who trained on more counts more (Di-PS §4.1)."""
    return float(tokens)


def weigh_alike(tokens: int) -> float:
    """One push, one vote (DiLoCo)."""
    return 1.0


WEIGHTS: Mapping[WeightRule, Callable[[int], float]] = {
    WeightRule.TOKENS: weigh_tokens,
    WeightRule.UNIFORM: weigh_alike,
}


def most_tokens(usual: Iterable[Sequence[int]]) -> int | None:
    """How many tokens of a push count at most, by those that counted of each cluster's last ones; None: any number."""
    medians = [median_low(tokens) for tokens in usual if len(tokens) >= TOKENS_KEPT]
    return MOST_TIMES * max(medians) if medians else None
