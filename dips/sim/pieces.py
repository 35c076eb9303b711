"""The elements of a model that a rank holds: the pieces that its streams transfer."""

from __future__ import annotations

from collections.abc import Iterable

from dips.wire.chunks import LayerLayout, Range


def rank_share(size: int, rank: int, ranks: int) -> slice:
    """Return the elements of a flat layer that one rank holds, as FSDP shards dimension 0."""
    return slice(size * rank // ranks, size * (rank + 1) // ranks)


def pieces_of(layout: LayerLayout, layers: Iterable[int], rank: int, ranks: int) -> list[Range]:
    """Return a rank's share of each layer as pieces of parameters, without empty ones."""
    found = []
    for (layer, param), field in layout.fields.items():
        if layer in layers:
            held = rank_share(layout.numel[layer], rank, ranks)
            begin, end = max(held.start, field.start), min(held.stop, field.start + field.numel)
            if begin < end:
                found.append(Range(layer, param, begin - field.start, end - begin))
    return found
