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
    staleness: int
    layers: Sequence[Numbers]
    flagged: frozenset[int] = frozenset()


def norm_of(numbers: Numbers) -> float:
    return sqrt(sum(x * x for x in numbers))


def combine(vectors: Sequence[Numbers], weights: Sequence[float]) -> Numbers:
    return [sum(w * v[i] for w, v in zip(weights, vectors, strict=True)) for i in range(len(vectors[0]))]


def weight_of(rule: str, push: Pushed, alpha: float) -> float:
    by_rule = {"tokens": push.tokens, "tokens_per_step": push.tokens / max(1, push.steps), "uniform": 1.0}
    return by_rule[rule] * exp(-alpha * max(0, push.staleness))


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


def edit(vectors: Sequence[Numbers], gs: Sequence[float], freshness: Sequence[float]) -> Numbers:
    """EDiT's equation 2 and 3: softmax(−G), about the smallest G."""
    raised = [f * exp(min(gs) - g) for g, f in zip(gs, freshness, strict=True)]
    return combine(vectors, [x / sum(raised) for x in raised])


def merge_layer(o: OuterOptions, pushes: Sequence[Pushed], layer: int, is_block: bool = True) -> Numbers | None:
    """The merged pseudo-gradient of one layer before clipping; None if every push is flagged there."""
    kept = [p for p in pushes if layer not in p.flagged]
    if not kept:
        return None
    vectors = [p.layers[layer] for p in kept]
    weights = [weight_of(o.weights, p, o.staleness_alpha) for p in kept]
    if o.merge in ("edit", "edit-paper"):
        gs = [
            norm_of(v) / (sqrt(max(1, p.steps)) if o.merge == "edit" else 1.0)
            for v, p in zip(vectors, kept, strict=True)
        ]
        return edit(vectors, gs, [weight_of("uniform", p, o.staleness_alpha) for p in kept])
    return rda(vectors, weights) if o.merge == "rda" and is_block else mean(vectors, weights)


def clip_all(
    clip: Clip, layers: Sequence[Numbers | None], median: float | None = None, medians: Sequence[float] = ()
) -> list[Numbers | None]:
    """Shorten what is too long: the whole model, or each layer by itself; medians are of a relative clip."""

    def limit(of: float | None) -> float | None:
        return clip.norm if clip.relative is None else None if of is None else clip.relative * of

    whole = sqrt(sum(norm_of(v) ** 2 for v in layers if v is not None))
    made: list[Numbers | None] = []
    for i, v in enumerate(layers):
        norm = norm_of(v or []) if clip.per_layer else whole
        most = limit(medians[i] if medians else None) if clip.per_layer else limit(median)
        made.append([x * most / norm for x in v] if v is not None and most is not None and norm > most else v)
    return made


def nesterov(mu: float, share: float, nth: bool) -> tuple[float, ...]:
    return (mu, 1.0, 1.0, mu)


def sgd(mu: float, share: float, nth: bool) -> tuple[float, ...]:
    return (0.0, 1.0, 1.0, 0.0)


def share_of_a_cycle(mu: float, share: float, nth: bool) -> tuple[float, ...]:
    return (mu**share, share, share, mu**share)


def delayed_nesterov(mu: float, share: float, nth: bool) -> tuple[float, ...]:
    return (mu, share, share, mu) if nth else (1.0, share / mu, share, 0.0)


STEPS: Mapping[str, Callable[[float, float, bool], tuple[float, ...]]] = {
    "nesterov": nesterov,
    "sgd": sgd,
    "share": share_of_a_cycle,
    "delayed_nesterov": delayed_nesterov,
}


def rate_of(clusters: int) -> float:
    """Of `outer.lr: auto`."""
    return float(np.interp(log2(clusters), (0, 1, 2, 3), (0.4, 0.6, 0.6, 0.8)))


def pseudo_gradient(anchor: str, theta: Numbers, base: Numbers | None, pushed: Numbers) -> Numbers:
    """θ − θ_j, of the θ that stands, or of that which the cluster had pulled; None: nobody holds that any more."""
    origin = base if anchor == "base" and base is not None else theta
    return [t - p for t, p in zip(origin, pushed, strict=True)]


def window_end(rule: str, window_s: float, most: float, arrived: Sequence[float], coming: Sequence[float]) -> float:
    """When a window ends that opened at 0; `arrived` is in it, `coming` is due, the last of it is what changed last.

    Sliding: a window after the newest arrival, or until all are in that are under way. Adaptive: half a window after
    the last that is due, of those up to whom all would have waited for a window in the mean.
    """
    ends = [window_s]
    if rule == "sliding":
        ends += [t + window_s for t in arrived] + list(coming)
    if rule == "adaptive":
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
