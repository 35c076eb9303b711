"""The coefficients of a round's step: `outer.step`, as g = s·acc; m′ = a·m + b·g; θ′ = θ − lr·(c·g + e·m′).

σ, a round's share, is its tokens over those that all live clusters contribute in a cycle: 1 if all push together, about
1/n if n clusters push one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.outer_step import Numbers, nesterov_numbers
from dips.protocol import plugins
from dips.protocol.enums import StepRule


@dataclass(frozen=True, slots=True)
class StepRound:
    """The input of a step rule."""

    momentum: float  # μ
    share: float  # σ, in (0, 1]


def step_nesterov(r: StepRound) -> Numbers:
    """Return the coefficients of torch.optim.SGD(nesterov=True), whatever the round contains."""
    return nesterov_numbers(r.momentum)


def step_sgd(r: StepRound) -> Numbers:
    """Return coefficients without momentum: m is the last g and does not enter θ."""
    return (0.0, 1.0, 1.0, 0.0)


def step_share(r: StepRound) -> Numbers:
    """Return coefficients by which a round of share σ adds σ·g and momentum decays by μ in a whole cycle; Nesterov's at
    σ = 1.

    Momentum enters each single round whole, so n of them go farther than one step of Nesterov. This is bounded because
    a push is subtracted from the present θ: a late one takes back what others did meanwhile
    (docs/guides/rules.md#share).
    """
    decay = r.momentum**r.share
    return (decay, r.share, r.share, decay)


STEPS: Mapping[StepRule, Callable[[StepRound], Numbers]] = {
    StepRule.NESTEROV: step_nesterov,
    StepRule.SGD: step_sgd,
    StepRule.SHARE: step_share,
}


def find_step(name: StepRule | str) -> Callable[[StepRound], Numbers]:
    """Return a built-in rule, or the one that a user's entry point of the group `dips.rules` names."""
    if isinstance(name, StepRule):
        return STEPS[name]
    found = plugins.load_plugin(plugins.RULES, name)
    if not callable(found):
        raise ConfigError(f"outer.step: expected {name} to be a function of a StepRound, got {found!r}")
    return cast("Callable[[StepRound], Numbers]", found)


def measure_share(round_tokens: Mapping[str, int], last_tokens: Mapping[str, int]) -> float:
    """Return σ of a round.

    round_tokens  tokens of its contributions, by cluster
    last_tokens   tokens of each live cluster's last accepted push; 0: it has none, and counts as the mean of the others
    """
    known = {**{name: tokens for name, tokens in last_tokens.items() if tokens}, **round_tokens}
    cycle, clusters = sum(known.values()), len(last_tokens.keys() | round_tokens.keys())
    return min(1.0, sum(round_tokens.values()) / (cycle * clusters / len(known)))
