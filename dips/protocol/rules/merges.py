"""Merging the pushes of a round into one pseudo-gradient, layer by layer: `outer.merge`.

A slave folds each push as it comes, `acc += w·d` with d = θ − θ_j, and scales the sum at the end. So a rule is two
functions: the weight of a push in a layer, relative to the first that counts there, and the scale that turns the sum
into a mean. softmax(−G) relative to the first G instead of the smallest is the same except for rounding in fp32: acc is
larger or smaller by a factor that the scale takes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, sqrt

from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.outer_step import MAX_FACTOR
from dips.protocol import plugins
from dips.protocol.enums import MergeRule

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


# ---- edit (EDiT §3.2): the smaller its norm, the more it weighs ------------------------------------------------------


def weigh_softmax(share: LayerShare, first: LayerShare) -> float:
    """Return softmax(−G/√steps) relative to the first; without √steps, fewer inner steps would give more weight."""
    gap = first.norm / sqrt(max(1, first.inner_steps)) - share.norm / sqrt(max(1, share.inner_steps))
    return _exp_clamped(gap)


def weigh_softmax_of_norms(share: LayerShare, first: LayerShare) -> float:
    """Return softmax(−G) relative to the first, as in EDiT's equation 2."""
    return _exp_clamped(first.norm - share.norm)


def scale_softmax(shares: Sequence[LayerShare], weights: Sequence[float], acc_norm: float) -> float:
    """Return 1 / Σ w."""
    return 1.0 / sum(weights)


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
    MergeRule.EDIT: Merge(weigh_softmax, scale_softmax),
    MergeRule.EDIT_PAPER: Merge(weigh_softmax_of_norms, scale_softmax),
}


def find_merge(name: MergeRule | str) -> Merge:
    """Return a built-in rule, or the one that a user's entry point of the group `dips.rules` names."""
    if isinstance(name, MergeRule):
        return MERGES[name]
    found = plugins.load_plugin(plugins.RULES, name)
    if not isinstance(found, Merge):
        raise ConfigError(f"outer.merge: expected {name} to be a dips.protocol.rules.merges.Merge, got {found!r}")
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
