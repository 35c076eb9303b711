"""Every rule of the outer step in plain Python, all pushes of a round known: what dips/protocol/rules must equal.

A rule is a few lines over lists of numbers, in fp64, with no order of folding, no first push and no scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log2, sqrt

import numpy as np

from dips.protocol.options import Clip, OuterOptions

Numbers = list[float]


@dataclass(frozen=True)
class Pushed:
    """One accepted push: its pseudo-gradients θ − θ_j by layer, and what it says of itself."""

    tokens: int
    steps: int
    layers: Sequence[Numbers]
    flagged: frozenset[int] = frozenset()


def norm_of(numbers: Numbers) -> float:
    return sqrt(sum(x * x for x in numbers))


def combine(vectors: Sequence[Numbers], weights: Sequence[float]) -> Numbers:
    return [sum(w * v[i] for w, v in zip(weights, vectors, strict=True)) for i in range(len(vectors[0]))]


def weight_of(rule: str, push: Pushed) -> float:
    return {"tokens": float(push.tokens), "uniform": 1.0}[rule]


def mean(vectors: Sequence[Numbers], weights: Sequence[float]) -> Numbers:
    """Σ w·d / Σ w."""
    return combine(vectors, [w / sum(weights) for w in weights])


def rda(vectors: Sequence[Numbers], weights: Sequence[float]) -> Numbers:
    """The mean of the directions, made as long as the mean of the lengths."""
    lengths = [norm_of(v) for v in vectors]
    directions = [[x / n for x in v] if n else v for v, n in zip(vectors, lengths, strict=True)]
    along = combine(directions, weights)
    length = sum(w * n for w, n in zip(weights, lengths, strict=True)) / sum(weights)
    return [length * x / norm_of(along) for x in along] if norm_of(along) else along


def edit(vectors: Sequence[Numbers], gs: Sequence[float]) -> Numbers:
    """EDiT's equation 2 and 3: softmax(−G). Beside a first G of thousands all usual ones count alike."""
    raised = [exp(max(-60.0, min(gs[0] - g, 60.0))) for g in gs]
    return combine(vectors, [x / sum(raised) for x in raised])


def merge_layer(o: OuterOptions, pushes: Sequence[Pushed], layer: int, is_block: bool = True) -> Numbers | None:
    """The merged pseudo-gradient of one layer before clipping; None if every push is flagged there."""
    kept = [p for p in pushes if layer not in p.flagged]
    if not kept:
        return None
    vectors = [p.layers[layer] for p in kept]
    weights = [weight_of(o.weights, p) for p in kept]
    if o.merge in ("edit", "edit-paper"):
        gs = [
            norm_of(v) / (sqrt(max(1, p.steps)) if o.merge == "edit" else 1.0)
            for v, p in zip(vectors, kept, strict=True)
        ]
        return edit(vectors, gs)
    if o.merge == "rda-paper" and is_block:
        return rda(vectors, [w * w / max(1, p.steps) for w, p in zip(weights, kept, strict=True)])
    return rda(vectors, weights) if o.merge == "rda" and is_block else mean(vectors, weights)


def clip_all(clip: Clip, layers: Sequence[Numbers | None]) -> list[Numbers | None]:
    """Shorten what is too long: the whole model, or each layer by itself."""
    whole = sqrt(sum(norm_of(v) ** 2 for v in layers if v is not None))
    made: list[Numbers | None] = []
    for v in layers:
        norm = norm_of(v or []) if clip.per_layer else whole
        most = clip.norm
        made.append([x * most / norm for x in v] if v is not None and most is not None and norm > most else v)
    return made


def nesterov(mu: float, share: float) -> tuple[float, ...]:
    return (mu, 1.0, 1.0, mu)


def sgd(mu: float, share: float) -> tuple[float, ...]:
    return (0.0, 1.0, 1.0, 0.0)


def share_of_a_cycle(mu: float, share: float) -> tuple[float, ...]:
    return (mu**share, share, share, mu**share)


STEPS: Mapping[str, Callable[[float, float], tuple[float, ...]]] = {
    "nesterov": nesterov,
    "sgd": sgd,
    "share": share_of_a_cycle,
}


def rate_of(clusters: int) -> float:
    """Of `outer.lr: auto`."""
    return float(np.interp(log2(clusters), (0, 1, 2, 3), (0.4, 0.6, 0.6, 0.8)))


def window_end(window_s: float, most: float, arrived: Sequence[float], coming: Sequence[float]) -> float:
    """When an adaptive window ends that opened at 0; `arrived` is in it, `coming` is due.

    Half a window after the last that is due, of those up to whom all would have waited for a window in the mean.
    """
    ends = [window_s]
    for last in (t for t in coming if t <= most * window_s):
        inside = [*arrived, *(t for t in coming if t <= last)]
        if sum(last - t for t in inside) / len(inside) <= window_s:
            ends.append(last + window_s / 2)
    return min(max(ends), most * window_s)


def take_step(theta: float, m: float, g: float, lr: float, numbers: tuple[float, ...]) -> tuple[float, float]:
    """θ′ and m′ of one element."""
    a, b, c, e = numbers
    m_next = a * m + b * g
    return theta - lr * (c * g + e * m_next), m_next
