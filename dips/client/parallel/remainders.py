"""What rounding takes from parameters of 16 bits that have no fp32 masters: kept, and added to the next push.

A pull of θ writes round(θ); the push after it carries p + (θ − round(θ)), p being the parameter by then. So a cluster
that trains nothing pushes θ bit for bit, since the difference is exact in fp32, and changes below half a unit in the
last place, of other clusters, are not undone. Costs 4 B of host memory for each such parameter of a rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dips.client.parallel.kept_shard import ShardCopy
from dips.client.parallel.plan import LocalRect
from dips.client.parallel.shard_copies import ShardBlocks, part_of


class Remainders:
    """Those of one rank; empty as long as nothing rounds."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int, int], torch.Tensor] = {}

    def keep_installed(self, copies: Iterable[ShardCopy]) -> None:
        """`host` of each was written into its tensor."""
        for copy in copies:
            if copy.rounds:
                torch.sub(copy.host, copy.host.to(copy.view.dtype).float(), out=self._allocate(copy))
            else:
                self._of.pop(copy.key, None)  # its masters, made since the last install, hold all of it now

    def write_merged(self, copy: ShardCopy, merged: torch.Tensor) -> None:
        """Write fp32 values into a copy's tensor, and keep what that rounds away."""
        copy.view.copy_(merged)
        if copy.rounds:
            self._allocate(copy).copy_(merged - copy.view.float())
        else:
            self._of.pop(copy.key, None)

    def add_to(self, target: torch.Tensor, layer: int, source: LocalRect, blocks: ShardBlocks) -> None:
        """Add the remainder of a part of the model to `target`, which was read from it."""
        if (remainder := self.read_part(layer, source, blocks)) is not None:
            target.add_(remainder)

    def read_part(self, layer: int, source: LocalRect, blocks: ShardBlocks) -> torch.Tensor | None:
        """The remainder of a part of the model, [rows, cols]; None if nothing of it was rounded away."""
        key = layer, source.param, source.index
        remainder = self._of.get(key)
        return None if remainder is None else part_of(remainder, blocks.host_block(*key)[0].rect, source.rect)

    def take_state(self) -> torch.Tensor | None:
        """All of them one behind the other, for a checkpoint; None if nothing rounds."""
        return torch.cat([r.reshape(-1) for _, r in sorted(self._of.items())]) if self._of else None

    def restore_state(self, saved: torch.Tensor | None) -> bool:
        """Take what `take_state` gave, or nothing; False if it was of another layout."""
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
