"""The copies of an install: from each block of the shard in host memory to the framework's tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dips.client.parallel.rect import Rect
from dips.client.parallel.seam import HeldParameter, TensorBlock
from dips.client.parallel.shard_buffer import ShardBuffer

LayerHeld = Sequence[HeldParameter | None]  # parameters of one layer in the manifest's order; None: not on this rank


@dataclass(frozen=True, eq=False)
class ShardCopy:
    """One copy from host memory to a tensor of the framework."""

    name: str  # of the parameter
    view: torch.Tensor  # the framework's tensor
    host: torch.Tensor
    rounds: bool = False  # the tensor has fewer bits than the pulled values and is itself pushed
    key: tuple[int, int, int] = (-1, -1, -1)  # layer, parameter, block; unset for masters


@dataclass(frozen=True)
class ShardBlocks:
    """The blocks of a rank's shard and their host memory."""

    held: Sequence[LayerHeld]
    buffer: ShardBuffer

    def host_block(self, layer: int, param: int, index: int) -> tuple[TensorBlock, torch.Tensor]:
        """Return a written block and its host memory, of the same shape."""
        held = self.held[layer][param]
        assert held is not None
        block = held.writes[index]
        memory = self.buffer.block_memory((layer, param, index), block.rect.numel)
        return block, memory.view(block.rect.rows, block.rect.cols)

    def parameter_copies(self) -> list[list[ShardCopy]]:
        """Return the copies to the parameters of each layer, in a fixed order."""
        found: list[list[ShardCopy]] = [[] for _ in self.held]
        for l, k, b in self.buffer.blocks:
            held = self.held[l][k]
            if held is not None:
                block, host = self.host_block(l, k, b)
                found[l].append(ShardCopy(held.name, block.view, host, rounds=_rounds(held, block), key=(l, k, b)))
        return found

    def master_copies(self, layer: int) -> Iterator[ShardCopy]:
        """Yield the copies to the optimizer's masters of one layer."""
        for k, held in enumerate(self.held[layer]):
            for master in held.masters if held else ():
                yield from self._copies_of_master(layer, k, master)

    def _copies_of_master(self, layer: int, param: int, master: TensorBlock) -> Iterator[ShardCopy]:
        held = self.held[layer][param]
        assert held is not None
        for b in range(len(held.writes)):
            block, host = self.host_block(layer, param, b)
            for part in block.rect.cut_between(master.rect.first, master.rect.end):
                for shared in master.rect.cut_between(part.first, part.end):
                    view, source = part_of(master.view, master.rect, shared), part_of(host, block.rect, shared)
                    yield ShardCopy(held.name, view, source)


def part_of(view: torch.Tensor, rect: Rect, part: Rect) -> torch.Tensor:
    """Return the part of a rectangle's memory, [part.rows, part.cols]."""
    row, col = rect.place_of(part)
    return view[row : row + part.rows, col : col + part.cols]


def _rounds(held: HeldParameter, block: TensorBlock) -> bool:
    """Return whether the block has fewer bits than the pulled values and is itself pushed."""
    return block.view.dtype is not torch.float32 and any(block is read for read in held.reads)
