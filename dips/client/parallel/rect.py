"""Rectangles of a full parameter's flattened elements: the place of a piece in the parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from dips.errors import ConfigError

# ---- rect -----------------------------------------------------------------------------------------------------------
# A full parameter is one row of elements in memory order. A rank's part of it is a few rectangles: `rows` runs of
# `cols` elements, `width` apart. A shard along the first dim is one run; a shard along another dim has as many runs as
# rows. Pure: no torch.


@dataclass(frozen=True, slots=True, order=True)
class Rect:
    """`rows` runs of `cols` elements; run r begins at element `first + r * width` of the full parameter."""

    first: int
    rows: int
    cols: int
    width: int

    @classmethod
    def make_canonical(cls, first: int, rows: int, cols: int, width: int) -> Rect:
        """Return the canonical form of a rectangle: one that is a single run has one row."""
        return cls.flat_run(first, rows * cols) if rows == 1 or cols == width else cls(first, rows, cols, width)

    @classmethod
    def flat_run(cls, first: int, length: int) -> Rect:
        """Return a rectangle of `length` consecutive elements."""
        return cls(first, 1, length, length)

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.first + (self.rows - 1) * self.width + self.cols

    @property
    def is_run(self) -> bool:
        return self.rows == 1

    def cut_between(self, begin: int, end: int) -> list[Rect]:
        """Return the intersection with elements [begin, end) of the parameter: at most three rectangles, in order."""
        begin, end = max(begin, self.first), min(end, self.end)
        if begin >= end:
            return []
        if self.is_run:
            return [Rect.flat_run(begin, end - begin)]
        top, left = divmod(begin - self.first, self.width)
        bottom, right = divmod(end - self.first, self.width)
        if top == bottom:
            return self._row_parts(top, 1, left, right)
        head = self._row_parts(top, 1, left, self.cols) if left else []
        body = self._row_parts(top + bool(left), bottom - top - bool(left), 0, self.cols)
        return [*head, *body, *self._row_parts(bottom, 1, 0, right)]

    def _row_parts(self, row: int, rows: int, left: int, right: int) -> list[Rect]:
        left, right = min(left, self.cols), min(right, self.cols)
        if rows < 1 or left >= right:
            return []
        return [Rect.make_canonical(self.first + row * self.width + left, rows, right - left, self.width)]

    def overlaps_with(self, other: Rect) -> bool:
        """Return whether the two share an element. Rectangles of several rows must have the same width."""
        if other.is_run:
            return bool(self.cut_between(other.first, other.end))
        if self.is_run:
            return bool(other.cut_between(self.first, self.end))
        (a, x), (b, y) = divmod(self.first, self.width), divmod(other.first, other.width)
        assert self.width == other.width, (self, other)
        return a < b + other.rows and b < a + self.rows and x < y + other.cols and y < x + self.cols

    def place_of(self, part: Rect) -> tuple[int, int]:
        """Return row and column of a part's first element in this rectangle."""
        return divmod(part.first - self.first, self.width)


def box_rects(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> list[Rect]:
    """Return the rectangles of the box of `sizes` at `starts` in a tensor of `shape`, in the order of the box's own
    memory.

    One rectangle for a tensor cut along one dim, or along two of which the outer is the first; otherwise one for each
    index of the dims before those.
    """
    if 0 in sizes:
        return []
    if tuple(sizes) == tuple(shape):
        return [Rect.flat_run(0, prod(shape))]
    cut = [d for d in range(len(shape)) if sizes[d] != shape[d]]
    inner = cut[-1]
    outer = next((d for d in reversed(cut) if d < inner), 0)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    cols, width = sizes[inner] * strides[inner], shape[inner] * strides[inner]
    rows = prod(sizes[outer:inner])
    steps = product(*(range(size) for size in sizes[:outer]))
    return [
        Rect.make_canonical(first + sum(i * s for i, s in zip(step, strides, strict=False)), rows, cols, width)
        for step in steps
    ]


def cut_flat(parts: Sequence[Rect], begin: int, end: int) -> Iterator[tuple[int, Rect]]:
    """Cut elements [begin, end) of memory that holds `parts` one after the other; yield (index of part, piece).

    A distributed optimizer's part of a shard is a run of the shard's memory, not of the full parameter.
    """
    at = 0
    for index, part in enumerate(parts):
        (top, left), (bottom, right) = divmod(begin - at, part.cols), divmod(end - at, part.cols)
        at += part.numel
        lowest = part.first + top * part.width + left
        highest = part.first + (bottom * part.width + right if right else (bottom - 1) * part.width + part.cols)
        for piece in part.cut_between(lowest, highest):
            yield index, piece


# ---- slabs ----------------------------------------------------------------------------------------------------------


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
