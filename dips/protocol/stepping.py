"""Weights of a push and the coefficients of a round: applies the rules (rules/) to the run's options and state.

What must stay true: a push's weights depend on it and on those folded before it, never on later ones, since slaves fold
each as it comes. In the common case, the mean of whole pushes, all layers share one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from statistics import median

from dips.outer_step import OuterStep, factor_at, join_factors, pick_factors, returned_share
from dips.protocol.effects import Fold
from dips.protocol.entities import Push, Round
from dips.protocol.rules.clips import Clipped, clip_layers, clip_whole
from dips.protocol.rules.merges import MEAN, LayerShare, Merge, find_merge, scale_layer, weigh_last
from dips.protocol.rules.rates import rate_of_clusters
from dips.protocol.rules.steps import StepRound, find_step, measure_share
from dips.protocol.rules.weights import WEIGHTS
from dips.protocol.run_state import RunState

# ---- a push ---------------------------------------------------------------------------------------------------------


def weigh_push(run: RunState, r: Round, push: Push) -> None:
    """Compute the weights of an accepted push, relative to the first that is folded."""
    o, most = run.options.outer, run.penalty.most_tokens()
    push.counted = push.tokens if most is None else min(push.tokens, most)
    if push.counted < push.tokens:
        run.emit_note("push_capped", push=push.id, tokens=push.tokens, counted=push.counted)
    push.merge_weight = WEIGHTS[o.weights](push.counted)
    push.weight = push.counted / r.folded[0].counted if r.folded else 1.0
    r.flagged |= bool(push.verdict is not None and push.verdict.flagged)
    layers = _layers_that_differ(run, r)
    weights = [weigh_last(_merge_of(run, i), _layer_shares(r.folded, i), _share_in(push, i)) for i in layers]
    push.layer_weights = () if set(weights) == {push.weight} else join_factors(tuple(weights))


def fold_order(r: Round, push: Push, layers: Sequence[int]) -> Fold:
    """Return the order for a slave that holds these layers."""
    weights = push.layer_weights
    return Fold(r.number, push.id, push.weight, pick_factors(weights, layers) if weights else ())


def _layers_that_differ(run: RunState, r: Round) -> Sequence[int]:
    """Return the layers whose weights and scales may differ; the first layer stands for all that are not returned."""
    by_layer = find_merge(run.options.outer.merge).by_layer or r.flagged
    return range(len(run.manifest.layers)) if by_layer else (0,)


def _merge_of(run: RunState, layer: int) -> Merge:
    merge = find_merge(run.options.outer.merge)
    return MEAN if merge.blocks_only and layer not in run.manifest.blocks else merge


def _layer_shares(pushes: Sequence[Push], layer: int) -> Iterator[LayerShare | None]:
    """Iterate over the pushes' shares in one layer, lazily, since a caller may stop at the first that counts."""
    return (_share_in(push, layer) for push in pushes)


def _share_in(push: Push, layer: int) -> LayerShare | None:
    if push.verdict is not None and layer in push.verdict.flagged:
        return None
    return LayerShare(push.merge_weight, sqrt(push.layer_sq[layer]), push.inner_steps)


# ---- a round --------------------------------------------------------------------------------------------------------


def make_step(run: RunState, r: Round) -> Clipped:
    """Compute the coefficients of the round's outer step; its norm may turn out not to be finite."""
    o = run.options.outer
    cut = _clip(run, r, _scale_layers(run, r))
    live = {cluster.name: cluster.last_tokens for cluster in run.clusters.values() if cluster.live}
    clusters = len(live.keys() | {push.id.cluster for push in r.folded})
    lr = rate_of_clusters(clusters) if isinstance(o.lr, str) else o.lr
    numbers = find_step(o.step)(_describe_round(run, r, live))
    r.step = OuterStep(cut.scales, lr, *numbers, returned_share(lr, numbers))
    return cut


def _scale_layers(run: RunState, r: Round) -> tuple[float, ...]:
    scales = []
    for layer in _layers_that_differ(run, r):
        weights = [factor_at(push.layer_weights or (push.weight,), layer) for push in r.folded]
        shares, acc_sq = _layer_shares(r.folded, layer), r.acc_sq[layer]
        scales.append(scale_layer(_merge_of(run, layer), shares, weights, sqrt(acc_sq) if acc_sq >= 0 else acc_sq))
    return join_factors(tuple(scales))


def _clip(run: RunState, r: Round, scales: tuple[float, ...]) -> Clipped:
    clip, norms = run.options.outer.clip, run.penalty.history.delta_norms
    if clip.per_layer:
        return clip_layers(scales, r.acc_sq, clip.norm)
    relative = clip.relative * median(norms) if clip.relative is not None and norms else None
    return clip_whole(scales, r.acc_sq, clip.norm if clip.relative is None else relative)


def _describe_round(run: RunState, r: Round, live: dict[str, int]) -> StepRound:
    """Return the round's momentum and share of a cycle, the input of a step rule."""
    tokens = dict[str, int]()
    for push in r.folded:
        tokens[push.id.cluster] = tokens.get(push.id.cluster, 0) + push.counted
    return StepRound(run.options.outer.momentum, measure_share(tokens, live))
