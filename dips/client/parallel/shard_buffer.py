"""The host memory of a rank's shard and pieces, and the places in it (memory_map.py).

Two buffers: one for this rank alone, and one shared by the ranks of its host that hold the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from dips.client.parallel.devices import FLOAT_BYTES, Device, map_pages
from dips.client.parallel.exchange import RankExchange
from dips.client.parallel.memory_map import LayerBlocks, find_block, map_memory
from dips.client.parallel.node_memory import share_memory
from dips.client.parallel.plan import LocalRect
from dips.client.parallel.replicas import Group, Place, SharedShards
from dips.transport.shares import Piece
from dips.wire.chunks import Range


class ShardBuffer:
    """The host buffers of a rank: 4 B for each parameter of the shard."""

    def __init__(
        self,
        device: Device,
        ranks: RankExchange,
        layers: Sequence[LayerBlocks],
        pieces: Sequence[Range],
        groups: Sequence[Group],
        *,
        pinned: bool,
    ) -> None:
        """Allocate the buffers. Collective.

        groups  the replica group of each rank
        pinned  lock the memory, for fast copies to and from the device
        """
        alone = [(rank,) for rank in range(ranks.world_size)]
        node = share_memory(
            ranks,
            groups or alone,
            _private_places(layers, pieces),
            lambda private: FLOAT_BYTES * _count_items(layers, private),
        )
        self.shards: SharedShards = node.shards
        self._sharers = len(self.shards.group_of.get(ranks.rank, (ranks.rank,)))
        self._block_at: dict[tuple[int, int, int], tuple[torch.Tensor, int]] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._in_block: set[int] = set()
        shared = {p for p in _all_places(layers) if self.shards.shares(ranks.rank, p)}
        self._own_numel = self._place(device, layers, pieces, lambda place: place not in shared, pinned)
        self._shared_numel = 0
        if node.pages is not None:
            array = np.frombuffer(node.pages, np.float32)
            if pinned:
                device.pin_pages(array)
            self._shared_numel = self._place(
                device, layers, pieces, lambda place: place in shared, pinned, torch.from_numpy(array)
            )
        self.pieces = [Piece(*piece, self._memory[number].numpy()) for number, piece in enumerate(pieces)]

    @property
    def blocks(self) -> Sequence[tuple[int, int, int]]:
        """Layer, parameter and number of each block, in a fixed order."""
        return list(self._block_at)

    @property
    def allocated_numel(self) -> int:
        """The elements of 4 B that are allocated; of shared memory only this rank's share."""
        return self._own_numel + -(-self._shared_numel // self._sharers)

    def block_memory(self, key: tuple[int, int, int], numel: int) -> torch.Tensor:
        """Return the memory of a block, flat."""
        buffer, at = self._block_at[key]
        return buffer[at : at + numel]

    def is_in_block(self, piece: int) -> bool:
        """Return whether a piece is part of a block of the shard, rather than sharing memory with blocks in turn."""
        return piece in self._in_block

    def piece_part(self, part: LocalRect) -> torch.Tensor:
        """Return a rectangle of a piece, [rows, cols]."""
        piece, memory, rect = self.pieces[part.index], self._memory[part.index], part.rect
        at = memory.storage_offset() + rect.first - piece.offset
        return memory.as_strided((rect.rows, rect.cols), (rect.width, 1), at)

    def _place(
        self,
        device: Device,
        layers: Sequence[LayerBlocks],
        pieces: Sequence[Range],
        belongs: Callable[[Place], bool],
        pinned: bool,
        buffer: torch.Tensor | None = None,
    ) -> int:
        """Lay out the parameters selected by `belongs` in a buffer, allocated if None; return its size."""
        some = [[rects if belongs((l, k)) else [] for k, rects in enumerate(blocks)] for l, blocks in enumerate(layers)]
        numbers = [number for number, piece in enumerate(pieces) if belongs((piece.layer, piece.param))]
        places = map_memory(some, [pieces[number] for number in numbers])
        if buffer is None:
            buffer = device.allocate_host(places.size) if pinned else torch.from_numpy(map_pages(places.size))
        self._block_at |= {key: (buffer, at) for key, at in places.block_at.items()}
        self._in_block |= {numbers[n] for n in places.in_block}
        for n, at in places.piece_at.items():
            self._memory[numbers[n]] = buffer[at : at + pieces[numbers[n]].length]
        return places.size


def _all_places(layers: Sequence[LayerBlocks]) -> list[Place]:
    return [(l, k) for l, blocks in enumerate(layers) for k in range(len(blocks))]


def _private_places(layers: Sequence[LayerBlocks], pieces: Sequence[Range]) -> set[Place]:
    """Return the parameters with a piece that is no part of a block here: pieces and blocks use the same memory in
    turn.
    """
    return {(p.layer, p.param) for p in pieces if find_block(layers[p.layer][p.param], p) is None}


def _count_items(layers: Sequence[LayerBlocks], without: Collection[Place]) -> int:
    return sum(
        rect.numel
        for l, blocks in enumerate(layers)
        for k, rects in enumerate(blocks)
        if (l, k) not in without
        for rect in rects
    )
