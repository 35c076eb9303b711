"""Clipping of a pseudo-gradient's norm, for the whole model or for each layer: `outer.clip`."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

from dips.dataclass import dataclass
from dips.outer_step import Factors, join_factors


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
