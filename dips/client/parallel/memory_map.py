"""Offsets of a rank's blocks and pieces in its host buffer, in elements, computed once. Pure: no torch.

A piece that is one run of a block shares the block's memory, so no copy is needed between the two. A parameter for
which that is impossible (shards along an inner dim) has memory that holds either its pieces or its blocks, never both
at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dips.client.parallel.rect import Rect
from dips.wire.chunks import Range


@dataclass(slots=True)
class MemoryMap:
    """The offsets of all blocks and pieces in the buffer, and its size."""

    piece_at: dict[int, int] = field(default_factory=dict)  # offset by number of the piece in the plan
    block_at: dict[tuple[int, int, int], int] = field(default_factory=dict)  # offset by layer, parameter, block
    in_block: set[int] = field(default_factory=set)  # pieces that share the memory of the one block that holds them
    size: int = 0


# One layer: for each parameter the rectangles of its written blocks.
LayerBlocks = Sequence[Sequence[Rect]]


def map_memory(layers: Sequence[LayerBlocks], pieces: Sequence[Range]) -> MemoryMap:
    """Lay out a buffer for all layers, one after the other."""
    found = MemoryMap()
    by_layer: list[dict[int, Range]] = [{} for _ in layers]
    for n, piece in enumerate(pieces):
        by_layer[piece.layer][n] = piece
    for number, (blocks, own) in enumerate(zip(layers, by_layer, strict=True)):
        found.size = _map_layer(found, number, blocks, own, found.size)
    return found


def _map_layer(found: MemoryMap, layer: int, blocks: LayerBlocks, pieces: Mapping[int, Range], begin: int) -> int:
    """Place one layer from offset `begin` on; return its end."""
    shared = {piece.param for piece in pieces.values() if find_block(blocks[piece.param], piece) is None}
    numbered = [((layer, k, b), rect.numel) for k, rects in enumerate(blocks) for b, rect in enumerate(rects)]
    at = begin
    for key, numel in numbered:
        if key[1] not in shared:
            found.block_at[key], at = at, at + numel
    for number, piece in pieces.items():
        block = find_block(blocks[piece.param], piece)
        if piece.param not in shared and block is not None:
            found.piece_at[number] = found.block_at[layer, piece.param, block[0]] + block[1]
            found.in_block.add(number)
    pieces_end = blocks_end = at
    for number, piece in pieces.items():
        if piece.param in shared:
            found.piece_at[number], pieces_end = pieces_end, pieces_end + piece.length
    for key, numel in numbered:
        if key[1] in shared:
            found.block_at[key], blocks_end = blocks_end, blocks_end + numel
    return max(pieces_end, blocks_end)


def find_block(blocks: Sequence[Rect], piece: Range) -> tuple[int, int] | None:
    """Return the block that holds the piece as one run, and the piece's offset in it; None if no block does."""
    for index, rect in enumerate(blocks):
        if rect.is_run and rect.first <= piece.offset and piece.offset + piece.length <= rect.end:
            return index, piece.offset - rect.first
    return None
