"""How the pushes of a round become one pseudo-gradient: `outer.merge`, layer by layer.

A slave folds each push as it comes, `acc += w·d` with d = θ − θ_j, and scales the sum at the end. So a rule is two
functions: what a push weighs in a layer, over the first that counts there; and the scale that makes a mean of the sum.
softmax(−G) about the first G instead of the smallest is the same but for rounding in fp32: acc is larger or smaller by
a factor, which the scale takes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, sqrt

from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.outer_step import MAX_FACTOR
from dips.protocol import plugins
from dips.protocol.enums import MergeRule

MOST_EXPONENT = 60.0  # e⁻⁶⁰ of a weight is nothing, and its inverse still fits fp32
LEAST_DIRECTION = 1e-6  # of the directions' mean length, 1 if all agree: below, they cancel and rounding is left


@dataclass(frozen=True, slots=True)
class LayerShare:
    """One push, in one layer."""

    weight: float  # of the push, by `outer.weights`
    norm: float  # ‖d‖₂ of the layer
    inner_steps: int


def has_any(share: LayerShare) -> bool:
    """Whatever it is, it counts."""
    return True


def has_direction(share: LayerShare) -> bool:
    """A vector of length 0 points nowhere."""
    return share.norm > 0.0


# ---- mean: Σ w·d / Σ w ----------------------------------------------------------------------------------------------


def weigh_mean(share: LayerShare, first: LayerShare) -> float:
    """Weights relative to the first's, so that no number depends on what comes later."""
    return share.weight / first.weight


def scale_mean(shares: Sequence[LayerShare], weights: Sequence[float], acc_norm: float) -> float:
    """c = w_first / Σ w."""
    return shares[0].weight / sum(share.weight for share in shares)


# ---- rda (Decoupled DiLoCo): the mean direction, with the mean length -----------------------------------------------


def weigh_direction(share: LayerShare, first: LayerShare) -> float:
    """w/‖d‖: directions are averaged, so nobody's length pulls the mean towards it."""
    return (share.weight / first.weight) * (first.norm / share.norm)


def scale_direction(shares: Sequence[LayerShare], weights: Sequence[float], acc_norm: float) -> float:
    """The mean length over ‖acc‖; directions that cancel leave no step, and momentum goes on."""
    total = sum(share.weight for share in shares)
    length = sum(share.weight * share.norm for share in shares) / total
    agreed = sum(weight * share.norm for weight, share in zip(weights, shares, strict=True))
    return length / acc_norm if acc_norm > LEAST_DIRECTION * agreed else LEAST_DIRECTION


# ---- edit (EDiT §3.2): the smaller its norm, the more it weighs ------------------------------------------------------


def weigh_softmax(share: LayerShare, first: LayerShare) -> float:
    """softmax(−G/√steps) about the first: with unequal steps a norm alone would favour who worked least."""
    gap = first.norm / sqrt(max(1, first.inner_steps)) - share.norm / sqrt(max(1, share.inner_steps))
    return _exp_clamped(gap)


def weigh_softmax_of_norms(share: LayerShare, first: LayerShare) -> float:
    """softmax(−G) about the first, as EDiT's equation 2 has it."""
    return _exp_clamped(first.norm - share.norm)


def scale_softmax(shares: Sequence[LayerShare], weights: Sequence[float], acc_norm: float) -> float:
    """1 / Σ w."""
    return 1.0 / sum(weights)


def _exp_clamped(exponent: float) -> float:
    return exp(max(-MOST_EXPONENT, min(exponent, MOST_EXPONENT)))


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Merge:
    """One rule."""

    weigh: Callable[[LayerShare, LayerShare], float]
    scale: Callable[[Sequence[LayerShare], Sequence[float], float], float]
    counts: Callable[[LayerShare], bool] = has_any  # else its weight is 0, though `scale` hears of it
    by_layer: bool = True  # False: the same in all of them
    blocks_only: bool = False  # layers outside the numbered blocks, embeddings and output, go by the mean


MEAN = Merge(weigh_mean, scale_mean, by_layer=False)
MERGES: Mapping[MergeRule, Merge] = {
    MergeRule.MEAN: MEAN,
    MergeRule.RDA: Merge(weigh_direction, scale_direction, has_direction, blocks_only=True),
    MergeRule.EDIT: Merge(weigh_softmax, scale_softmax),
    MergeRule.EDIT_PAPER: Merge(weigh_softmax_of_norms, scale_softmax),
}


def find_merge(name: MergeRule | str) -> Merge:
    """Return one of ours, or what a user's entry point of the group `dips.rules` names."""
    if isinstance(name, MergeRule):
        return MERGES[name]
    found = plugins.load_plugin(plugins.RULES, name)
    if not isinstance(found, Merge):
        raise ConfigError(f"outer.merge: expected {name} to be a dips.protocol.rules.merges.Merge, got {found!r}")
    return found


# ---- one layer of a round -------------------------------------------------------------------------------------------

LayerShares = Iterable[LayerShare | None]  # of pushes of a round, in the order of folding; None: flagged there


def weigh_last(merge: Merge, before: LayerShares, last: LayerShare | None) -> float:
    """What a push weighs after those folded before it: 0 if it does not count, 1 if none of them does."""
    if last is None or not merge.counts(last):
        return 0.0
    first = next((share for share in before if share is not None and merge.counts(share)), None)
    return 1.0 if first is None else min(max(merge.weigh(last, first), 1.0 / MAX_FACTOR), MAX_FACTOR)


def scale_layer(merge: Merge, shares: LayerShares, weights: Iterable[float], acc_norm: float) -> float:
    """What makes a mean of the sum; 0, which leaves the layer as it is, if every push is flagged there."""
    pairs = [(share, weight) for share, weight in zip(shares, weights, strict=True) if share is not None]
    if not pairs:
        return 0.0
    kept, kept_weights = zip(*pairs, strict=True)
    return min(merge.scale(kept, kept_weights, acc_norm), MAX_FACTOR)
