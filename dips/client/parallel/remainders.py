"""Rounding errors of 16-bit parameters without fp32 masters, kept and added to the next push.

A pull of θ writes round(θ); the next push sends p + (θ − round(θ)), where p is the parameter at that time. So a cluster
that trains nothing pushes θ bit for bit, since the difference is exact in fp32, and other clusters' changes below half
a unit in the last place are not undone. Costs 4 B of host memory per such parameter of a rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dips.client.parallel.blocks import split_together
from dips.client.parallel.devices import HOST_BLOCK_ITEMS
from dips.client.parallel.plan import LocalRect
from dips.client.parallel.shard_copies import ShardBlocks, ShardCopy, part_of


class Remainders:
    """The rounding errors of one rank; empty as long as no parameter rounds."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int, int], torch.Tensor] = {}

    def keep_installed(self, copies: Iterable[ShardCopy]) -> None:
        """Store the rounding errors of an install that has written `host` of each copy into its tensor."""
        for copy in copies:
            if copy.rounds:
                for host, rounded in split_together(HOST_BLOCK_ITEMS, copy.host, self._allocate(copy)):
                    torch.sub(host, host.to(copy.view.dtype).float(), out=rounded)
            else:
                self._of.pop(copy.key, None)  # masters made since the last install hold the exact value

    def room_for(self, copy: ShardCopy) -> torch.Tensor | None:
        """Return the memory for the rounding errors of a merge; None if the copy does not round."""
        if copy.rounds:
            return self._allocate(copy)
        self._of.pop(copy.key, None)
        return None

    @property
    def any(self) -> bool:
        """Whether any rounding error is stored."""
        return bool(self._of)

    @property
    def allocated_numel(self) -> int:
        """The elements of 4 B that are allocated."""
        return sum(remainder.numel() for remainder in self._of.values())

    def part_for(self, layer: int, source: LocalRect, blocks: ShardBlocks) -> torch.Tensor | None:
        """Return the rounding errors of a part of the model; None if it does not round."""
        key = layer, source.param, source.index
        if (remainder := self._of.get(key)) is None:
            return None
        return part_of(remainder, blocks.host_block(*key)[0].rect, source.rect)

    def take_state(self) -> torch.Tensor | None:
        """Return all rounding errors concatenated, for a checkpoint; None if no parameter rounds."""
        return torch.cat([r.reshape(-1) for _, r in sorted(self._of.items())]) if self._of else None

    def restore_state(self, saved: torch.Tensor | None) -> bool:
        """Restore the value of `take_state`, or zeros for None; return False if it is of another layout."""
        mine = [r for _, r in sorted(self._of.items())]
        if saved is None or saved.numel() != sum(r.numel() for r in mine):
            for remainder in mine:
                remainder.zero_()
            return saved is None
        for remainder, part in zip(mine, saved.split([r.numel() for r in mine]), strict=True):
            remainder.copy_(part.view(remainder.shape))
        return True

    def _allocate(self, copy: ShardCopy) -> torch.Tensor:
        if copy.key not in self._of:
            self._of[copy.key] = torch.zeros(copy.host.shape)
        return self._of[copy.key]
