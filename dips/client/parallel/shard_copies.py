"""What an install copies: for each block of the shard in host memory, the framework's tensor that it goes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dips.client.parallel.kept_shard import ShardCopy
from dips.client.parallel.rect import Rect
from dips.client.parallel.seam import HeldParameter, TensorBlock

LayerHeld = Sequence[HeldParameter | None]  # of one layer, by the manifest's order; None: nothing of it is here


@dataclass(frozen=True)
class ShardBlocks:
    """The blocks of a rank's shard, and where each lies in host memory."""

    held: Sequence[LayerHeld]
    block_at: Mapping[tuple[int, int, int], int]
    host: torch.Tensor

    def host_block(self, layer: int, param: int, index: int) -> tuple[TensorBlock, torch.Tensor]:
        """A block that is written, and its host memory of the same shape."""
        held = self.held[layer][param]
        assert held is not None
        block, at = held.writes[index], self.block_at[layer, param, index]
        return block, self.host[at : at + block.rect.numel].view(block.rect.rows, block.rect.cols)

    def parameter_copies(self, layer: int) -> Iterator[ShardCopy]:
        """To the parameters of one layer, in a fixed order."""
        for l, k, b in self.block_at:
            held = self.held[l][k]
            if l == layer and held is not None:
                block, host = self.host_block(l, k, b)
                yield ShardCopy(held.name, block.view, host, rounds=_rounds(held, block), key=(l, k, b))

    def master_copies(self, layer: int) -> Iterator[ShardCopy]:
        """To the optimizer's masters of one layer."""
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
    """The part of a rectangle's memory, [part.rows, part.cols]."""
    row, col = rect.place_of(part)
    return view[row : row + part.rows, col : col + part.cols]


def _rounds(held: HeldParameter, block: TensorBlock) -> bool:
    """The block has fewer bits than what is pulled, and what is pushed is the block itself."""
    return block.view.dtype is not torch.float32 and any(block is read for read in held.reads)
