"""The gate `edit` (EDiT §3.2): a z-test of each layer's norm; layers that fail it are left out of the sum.

A push is accepted if at least one of its layers passes. σ is corrected and floored as for the gate `dips` (norms.py).
"""

from __future__ import annotations

from math import sqrt

from dips.protocol.gates.norms import LEAST_SIGMA, Past, spread_factor
from dips.protocol.options import PenaltyOptions
from dips.protocol.records import LayerStatistics
from dips.protocol.verdicts import Finding, Opinion, PushEvidence


def judge_layers(push: PushEvidence, past: Past) -> Opinion:
    """Leave out layers with z = (G − μ)/σ above β; gate the push if all layers fail."""
    if past.row.warm_left > 0 or push.exempt or len(past.row.layers) != len(push.layer_sq):
        return Opinion(Finding.PASSED, "its layers have no score yet")
    norms, moving = layer_norms(push), 0
    scores = dict[int, float]()
    for place, (norm, layer) in enumerate(zip(norms, past.row.layers, strict=True)):
        if norm > 0.0:
            moving += 1
            scores[place] = score_layer(norm, layer, past.options)
    worst = max(scores.values(), default=0.0)
    flagged = frozenset(place for place, score in scores.items() if score > past.options.beta)
    if not flagged:
        return Opinion(Finding.PASSED, f"largest score of a layer {worst:.3g}, at most {past.options.beta:g}", worst)
    said = f"{len(flagged)} of {moving} layers above {past.options.beta:g} σ of their norms, the largest {worst:.3g}"
    if len(flagged) == moving:
        return Opinion(Finding.GATED, said, worst)
    return Opinion(Finding.FLAGGED, f"{said}: left out", worst, flagged=flagged)


def layer_norms(push: PushEvidence) -> list[float]:
    """Return ‖d‖₂ / √(inner steps) of each layer; the division makes clusters of different paces comparable."""
    return [sqrt(sq / max(1, push.inner_steps)) for sq in push.layer_sq]


def score_layer(norm: float, layer: LayerStatistics, options: PenaltyOptions) -> float:
    """Return the z-score of a layer's norm; 0 while fewer than two norms of the layer are known."""
    if layer.n < 2:
        return 0.0
    sigma = layer.sigma * spread_factor(layer.n, options.alpha)
    return (norm - layer.mu) / max(sigma, options.sigma_floor * layer.mu, LEAST_SIGMA)
