"""The rules of the outer step: tables of pure functions, by the values of `shared.outer` (docs/guides/rules.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, isfinite, log2, sqrt
from statistics import median_low
from typing import cast

from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.outer_step import MAX_FACTOR, Factors, Numbers, join_factors, nesterov_numbers
from dips.protocol import plugins
from dips.protocol.enums import MergeRule, StepRule, WeightRule

# ---- rates ----------------------------------------------------------------------------------------------------------


# Best outer learning rates of DiLoCo's scaling laws (Charles et al. 2025), by log2 of the clusters.
BEST_RATES = (0.4, 0.6, 0.6, 0.8)  # for 1, 2, 4 and 8


def rate_of_clusters(clusters: int) -> float:
    """Return the best rate for this many clusters: interpolated in the table along log2, constant beyond its end."""
    at = min(log2(max(1, clusters)), len(BEST_RATES) - 1.0)
    below = min(int(at), len(BEST_RATES) - 2)
    return BEST_RATES[below] + (at - below) * (BEST_RATES[below + 1] - BEST_RATES[below])


# ---- weights --------------------------------------------------------------------------------------------------------
# The weight of a push among those of its round: `outer.weights`.
#
# A script reports how many tokens it trained on. In weights and in the run's progress a push counts for at most
# MOST_TIMES the usual tokens of the cluster with the largest usual pushes, so that a cluster that counts wrongly, or
# lies, neither determines θ alone nor ends the run. Limits: nothing is usual until some cluster has TOKENS_KEPT pushes;
# and a cluster that goes on claiming more is believed more, MOST_TIMES as much every third push.


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


# ---- clips ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clipped:
    """The scales of a step after clipping, and the norm before it."""

    scales: Factors
    norm: float  # ‖δ‖ of the whole model
    clipped: bool

    @property
    def finite(self) -> bool:
        return isfinite(self.norm)


def clip_whole(scales: Factors, acc_sq: Sequence[float], limit: float | None) -> Clipped:
    """Scale all layers by one factor if their common norm exceeds the limit; None: no limit."""
    norms = _scale_norms(scales, acc_sq)
    norm = scales[0] * _root(sum_in_order(acc_sq)) if len(scales) == 1 else _root(sum_in_order([n * n for n in norms]))
    if limit is None or not norm > limit:
        return Clipped(scales, norm, False)
    return Clipped(tuple(s * (limit / norm) for s in scales), norm, True)


def clip_layers(scales: Factors, acc_sq: Sequence[float], limit: float | None) -> Clipped:
    """Scale each layer whose norm exceeds the limit."""
    whole = clip_whole(scales, acc_sq, None)
    every = scales if len(scales) > 1 else scales * len(acc_sq)
    pairs = zip(every, _scale_norms(scales, acc_sq), strict=True)
    cut = [s * (limit / norm) if limit is not None and norm > limit else s for s, norm in pairs]
    clipped = any(made != s for made, s in zip(cut, every, strict=True))
    return Clipped(join_factors(tuple(cut)), whole.norm, clipped)


def sum_in_order(numbers: Sequence[float]) -> float:
    """Sum from left to right; the built-in sum rounds differently from Python 3.12 on."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def _scale_norms(scales: Factors, acc_sq: Sequence[float]) -> tuple[float, ...]:
    every = scales if len(scales) > 1 else scales * len(acc_sq)
    return tuple(s * _root(sq) for s, sq in zip(every, acc_sq, strict=True))


def _root(square: float) -> float:
    """Return the square root; NaN of a negative number or NaN."""
    return sqrt(square) if square >= 0 else float("nan")


# ---- merges ---------------------------------------------------------------------------------------------------------
# Merging the pushes of a round into one pseudo-gradient, layer by layer: `outer.merge`.
#
# A slave folds each push as it comes, `acc += w·d` with d = θ − θ_j, and scales the sum at the end. So a rule is two
# functions: the weight of a push in a layer, relative to the first that counts there, and the scale that turns the sum
# into a mean. softmax(−G) relative to the first G instead of the smallest is the same except for rounding in fp32: acc
# is larger or smaller by a factor that the scale takes back.


MOST_EXPONENT = 60.0  # e⁻⁶⁰ of a weight is negligible, and its inverse still fits fp32
LEAST_DIRECTION = 1e-6  # of the directions' mean length, which is 1 if all agree: below, they cancel but for rounding


@dataclass(frozen=True, slots=True)
class LayerShare:
    """One push, in one layer."""

    weight: float  # of the push, by `outer.weights`
    norm: float  # ‖d‖₂ of the layer
    inner_steps: int


def has_any(share: LayerShare) -> bool:
    """Return True: every push counts."""
    return True


def has_direction(share: LayerShare) -> bool:
    """Whether the push counts: a vector of length 0 has no direction."""
    return share.norm > 0.0


# ---- mean: Σ w·d / Σ w ----------------------------------------------------------------------------------------------


def weigh_mean(share: LayerShare, first: LayerShare) -> float:
    """Return the push's weight relative to the first's, which later pushes do not change."""
    return share.weight / first.weight


def scale_mean(shares: Sequence[LayerShare], weights: Sequence[float], acc_norm: float) -> float:
    """Return c = w_first / Σ w."""
    return shares[0].weight / sum(share.weight for share in shares)


# ---- rda (Decoupled DiLoCo): the mean direction, with the mean length -----------------------------------------------


def weigh_direction(share: LayerShare, first: LayerShare) -> float:
    """Return w/‖d‖, relative to the first's: directions are averaged, so a push's length gives it no weight."""
    return (share.weight / first.weight) * (first.norm / share.norm)


def scale_direction(shares: Sequence[LayerShare], weights: Sequence[float], acc_norm: float) -> float:
    """Return the mean length over ‖acc‖; directions that cancel make no step, and momentum goes on."""
    total = sum(share.weight for share in shares)
    length = sum(share.weight * share.norm for share in shares) / total
    agreed = sum(weight * share.norm for weight, share in zip(weights, shares, strict=True))
    return length / acc_norm if acc_norm > LEAST_DIRECTION * agreed else LEAST_DIRECTION


def weigh_work(share: LayerShare) -> LayerShare:
    """Return the share with the weight of Decoupled DiLoCo: tokens²/steps, if `weights` is tokens."""
    return LayerShare(share.weight**2 / max(1, share.inner_steps), share.norm, share.inner_steps)


def weigh_direction_by_work(share: LayerShare, first: LayerShare) -> float:
    """Return w/‖d‖ relative to the first's, with w = tokens²/steps."""
    return weigh_direction(weigh_work(share), weigh_work(first))


def scale_direction_by_work(shares: Sequence[LayerShare], weights: Sequence[float], acc_norm: float) -> float:
    """Return the mean length by these weights over ‖acc‖."""
    return scale_direction([weigh_work(share) for share in shares], weights, acc_norm)


# ---- edit (EDiT §3.2): the smaller its norm, the more it weighs ------------------------------------------------------


def weigh_softmax(share: LayerShare, first: LayerShare) -> float:
    """Return softmax(−G/√steps) relative to the first; without √steps, fewer inner steps would give more weight."""
    gap = first.norm / sqrt(max(1, first.inner_steps)) - share.norm / sqrt(max(1, share.inner_steps))
    return _exp_clamped(gap)


def weigh_softmax_of_norms(share: LayerShare, first: LayerShare) -> float:
    """Return softmax(−G) relative to the first, as in EDiT's equation 2."""
    return _exp_clamped(first.norm - share.norm)


def scale_softmax(shares: Sequence[LayerShare], weights: Sequence[float], acc_norm: float) -> float:
    """Return 1 / Σ w; 1 if no push counts in the layer, whose sum is 0."""
    return 1.0 / (sum(weights) or 1.0)


def _exp_clamped(exponent: float) -> float:
    return exp(max(-MOST_EXPONENT, min(exponent, MOST_EXPONENT)))


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Merge:
    """One rule of merging."""

    weigh: Callable[[LayerShare, LayerShare], float]
    scale: Callable[[Sequence[LayerShare], Sequence[float], float], float]
    counts: Callable[[LayerShare], bool] = has_any  # a push that does not count has weight 0, but is passed to `scale`
    by_layer: bool = True  # False: all layers have the same weights
    blocks_only: bool = False  # layers outside the numbered blocks, embeddings and output, are merged by the mean


MEAN = Merge(weigh_mean, scale_mean, by_layer=False)
MERGES: Mapping[MergeRule, Merge] = {
    MergeRule.MEAN: MEAN,
    MergeRule.RDA: Merge(weigh_direction, scale_direction, has_direction, blocks_only=True),
    MergeRule.RDA_PAPER: Merge(weigh_direction_by_work, scale_direction_by_work, has_direction, blocks_only=True),
    MergeRule.EDIT: Merge(weigh_softmax, scale_softmax),
    MergeRule.EDIT_PAPER: Merge(weigh_softmax_of_norms, scale_softmax),
}


def find_merge(name: MergeRule | str) -> Merge:
    """Return a built-in rule, or the one that a user's entry point of the group `dips.rules` names."""
    if isinstance(name, MergeRule):
        return MERGES[name]
    found = plugins.load_plugin(plugins.RULES, name)
    if not isinstance(found, Merge):
        raise ConfigError(f"outer.merge: expected {name} to be a dips.protocol.rules.Merge, got {found!r}")
    return found


# ---- one layer of a round -------------------------------------------------------------------------------------------

LayerShares = Iterable[LayerShare | None]  # of pushes of a round, in the order of folding; None: flagged there


def weigh_last(merge: Merge, before: LayerShares, last: LayerShare | None) -> float:
    """Return the weight of a push after those folded before it: 0 if it does not count, 1 for the first that does."""
    if last is None or not merge.counts(last):
        return 0.0
    first = next((share for share in before if share is not None and merge.counts(share)), None)
    return 1.0 if first is None else min(max(merge.weigh(last, first), 1.0 / MAX_FACTOR), MAX_FACTOR)


def scale_layer(merge: Merge, shares: LayerShares, weights: Iterable[float], acc_norm: float) -> float:
    """Return the scale that turns the sum into a mean; 0, which leaves the layer unchanged, if every push is flagged
    there.
    """
    pairs = [(share, weight) for share, weight in zip(shares, weights, strict=True) if share is not None]
    if not pairs:
        return 0.0
    kept, kept_weights = zip(*pairs, strict=True)
    return min(merge.scale(kept, kept_weights, acc_norm), MAX_FACTOR)


# ---- steps ----------------------------------------------------------------------------------------------------------
# The coefficients of a round's step: `outer.step`, as g = s·acc; m′ = a·m + b·g; θ′ = θ − lr·(c·g + e·m′).
#
# σ, a round's share, is its tokens over those that all live clusters contribute in a cycle: 1 if all push together,
# about 1/n if n clusters push one after another.


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
    """Return σ, the share that a round has in the tokens of a cycle of all live clusters.

    round_tokens  tokens of its contributions, by cluster
    last_tokens   tokens of each live cluster's last accepted push; 0: it has none, and counts as the mean of the others
    """
    known = {**{name: tokens for name, tokens in last_tokens.items() if tokens}, **round_tokens}
    cycle, clusters = sum(known.values()), len(last_tokens.keys() | round_tokens.keys())
    return min(1.0, sum(round_tokens.values()) / (cycle * clusters / len(known)))
