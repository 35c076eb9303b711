"""What a push weighs among those of its round: `outer.weights`, and less the older its base is.

A script says how many tokens it trained on. No more of them count, in weights and in the run's progress, than
MOST_TIMES what the cluster that brings most usually brings: so one that counts wrongly, or lies, neither makes θ alone
nor ends the run. Limits: until some cluster has brought TOKENS_KEPT pushes nothing is usual; and who goes on claiming
more is believed more, MOST_TIMES as much every third push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp
from statistics import median_low

from dips.protocol.enums import WeightRule

TOKENS_KEPT = 5  # of a cluster's last pushes, whose median is usual
MOST_TIMES = 16  # a cluster that was cut off, or has grown, brings more at once
MOST_EXPONENT = 60.0  # e⁻⁶⁰ of a weight is nothing, and its inverse still fits fp32


def weigh_tokens(tokens: int, inner_steps: int) -> float:
    """Who trained on more counts more (Di-PS §4.1)."""
    return float(tokens)


def weigh_batch(tokens: int, inner_steps: int) -> float:
    """Tokens of an inner step: a larger batch has a better direction, more steps have only gone further."""
    return tokens / max(1, inner_steps)


def weigh_alike(tokens: int, inner_steps: int) -> float:
    """One push, one vote (DiLoCo)."""
    return 1.0


WEIGHTS: Mapping[WeightRule, Callable[[int, int], float]] = {
    WeightRule.TOKENS: weigh_tokens,
    WeightRule.TOKENS_PER_STEP: weigh_batch,
    WeightRule.UNIFORM: weigh_alike,
}


def measure_freshness(alpha: float, staleness: int) -> float:
    """e^(−α·staleness), never 0: somebody must weigh something."""
    return exp(-min(alpha * max(0, staleness), MOST_EXPONENT))


def most_tokens(usual: Iterable[Sequence[int]]) -> int | None:
    """How many tokens of a push count at most, by those that counted of each cluster's last ones; None: any number."""
    medians = [median_low(tokens) for tokens in usual if len(tokens) >= TOKENS_KEPT]
    return MOST_TIMES * max(medians) if medians else None
