"""What a push weighs among those of its round: `outer.weights`, and less the older its base is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp

from dips.protocol.enums import WeightRule

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
