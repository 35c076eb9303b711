"""The host memory of a rank's shard and pieces: one buffer, and where everything lies in it (memory_map.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dips.client.parallel.devices import Device
from dips.client.parallel.memory_map import LayerBlocks, map_memory
from dips.client.parallel.plan import LocalRect
from dips.transport.shares import Piece
from dips.wire.chunks import Range


class ShardBuffer:
    """4 B for each parameter of the shard, or of its largest layer."""

    def __init__(
        self, device: Device, layers: Sequence[LayerBlocks], pieces: Sequence[Range], *, one_layer: bool
    ) -> None:
        places = map_memory(layers, pieces, one_layer=one_layer)
        self._block_at, self._numel = places.block_at, places.size
        self._in_block = places.in_block
        self._host = device.allocate_host(places.size)
        self._memory = [self._host[places.piece_at[n] :][: piece.length] for n, piece in enumerate(pieces)]
        self.pieces = [Piece(*piece, memory.numpy()) for piece, memory in zip(pieces, self._memory, strict=True)]

    def is_in_block(self, piece: int) -> bool:
        """Whether a piece lies within a block of the shard, or shares memory with blocks without being part of one."""
        return piece in self._in_block

    @property
    def blocks(self) -> Sequence[tuple[int, int, int]]:
        """Layer, parameter and number of each block, in a fixed order."""
        return list(self._block_at)

    @property
    def allocated_numel(self) -> int:
        """Elements of 4 B that are allocated."""
        return self._numel

    def block_memory(self, key: tuple[int, int, int], numel: int) -> torch.Tensor:
        """A block, flat."""
        return self._host[self._block_at[key] :][:numel]

    def piece_part(self, part: LocalRect) -> torch.Tensor:
        """A rectangle of a piece, [rows, cols]."""
        piece, memory, rect = self.pieces[part.index], self._memory[part.index], part.rect
        at = memory.storage_offset() + rect.first - piece.offset
        return memory.as_strided((rect.rows, rect.cols), (rect.width, 1), at)
