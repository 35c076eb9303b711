"""Slabs of a parameter: contiguous ranges that do not overlap, with the rectangles that the ranks hold of each.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dips.client.parallel.rect import Rect
from dips.errors import ConfigError


@dataclass(slots=True)
class Slab:
    """A contiguous range of a parameter that overlaps no other slab, and the rectangles that make it up."""

    begin: int
    end: int
    rects: list[Rect]


def cut_slabs(name: str, found: Iterable[Rect], numel: int) -> Iterator[Slab]:
    """Group sorted rectangles whose ranges overlap. Raises ConfigError unless they cover the parameter exactly once."""
    at, slab = 0, None
    for rect in found:
        if slab is not None and rect.first < slab.end:
            slab.rects.append(rect)
            slab.end = max(slab.end, rect.end)
            continue
        if slab is not None:
            yield _check_slab(name, slab)
            at = slab.end
        if rect.first != at:
            raise ConfigError(f"{name}: elements {at} to {rect.first} are held by no rank")
        slab = Slab(rect.first, rect.end, [rect])
    if slab is not None:
        yield _check_slab(name, slab)
        at = slab.end
    if at != numel:
        raise ConfigError(f"{name}: elements {at} to {numel} are held by no rank")


def _check_slab(name: str, slab: Slab) -> Slab:
    if len({rect.width for rect in slab.rects if not rect.is_run}) > 1:
        raise ConfigError(f"{name}: ranks hold it cut along different dims")
    for i, rect in enumerate(slab.rects):
        if any(rect.overlaps_with(other) for other in slab.rects[:i]):
            raise ConfigError(f"{name}: ranks hold shards that overlap without being equal")
    if sum(rect.numel for rect in slab.rects) != slab.end - slab.begin:
        raise ConfigError(f"{name}: not all of its elements {slab.begin} to {slab.end} are held by a rank")
    return slab
