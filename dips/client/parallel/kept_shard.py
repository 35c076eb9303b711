"""This rank's shard as it was when it was pushed, kept for the merge that follows under `overlap: full`.

    keep_copies       at the push: what the tensors hold
    subtract_kept     when a version has arrived on all ranks: pulled − kept, in the memory of what was kept. Where a
                      version lies in place in the shard, a thread does it beside training
    difference        in the merge: what is added to the tensor

So a merge reads one stretch of host memory beside the tensor, as an install does, and as many bytes go to a device.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from dips.client.parallel.copies import read_tensor
from dips.client.parallel.devices import Device
from dips.client.parallel.shard_copies import ShardCopy


class KeptShard:
    """Copies of the framework's tensors in host memory, allocated at the first `keep_copies` and reused."""

    def __init__(self, device: Device) -> None:
        self._device, self.alpha = device, 1.0
        self._memory: dict[ShardCopy, torch.Tensor] = {}
        self._kept: set[ShardCopy] = set()  # hold what was kept
        self._differences: set[ShardCopy] = set()  # hold the difference

    @property
    def allocated_numel(self) -> int:
        """Elements of 4 B that are allocated."""
        return sum(memory.numel() for memory in self._memory.values())

    def keep_copies(self, copies: Iterable[ShardCopy], all_copies: Iterable[ShardCopy]) -> None:
        """Copy what the tensors of `copies` hold now; of `all_copies` some will be kept at one time or other."""
        if not self._memory:
            self._memory = _allocate_copies(self._device, list(all_copies))
        with self._device.ordered_copies():
            for copy in copies:
                read_tensor(self._device, copy.view, self._memory[copy])
                self._kept.add(copy)
                self._differences.discard(copy)
            self._device.synchronize()

    def move_copies(self, copies: Iterable[ShardCopy]) -> None:
        """The framework's tensors lie elsewhere: `copies` are the same, in the same order, or nothing is kept."""
        moved = list(copies)
        if len(moved) != len(self._memory):
            self._memory, self._kept, self._differences = {}, set(), set()
            return
        new = dict(zip(self._memory, moved, strict=True))
        self._memory = {new[copy]: memory for copy, memory in self._memory.items()}
        self._kept, self._differences = ({new[copy] for copy in some} for some in (self._kept, self._differences))

    def holds(self, copies: Iterable[ShardCopy]) -> bool:
        """Whether all of them were kept, and none was merged since."""
        return all(copy in self._kept or copy in self._differences for copy in copies)

    def subtract_kept(self, copies: Iterable[ShardCopy]) -> None:
        """Turn what was kept of these into `alpha` times what was pulled less it, once; legal in any thread."""
        for copy in copies:
            if copy in self._kept:
                memory = self._memory[copy].numpy()
                np.subtract(copy.host.numpy(), memory, out=memory)  # numpy: no threads of torch's beside training
                if self.alpha != 1.0:
                    np.multiply(memory, np.float32(self.alpha), out=memory)
                self._kept.discard(copy)
                self._differences.add(copy)

    def difference(self, copy: ShardCopy) -> torch.Tensor:
        """What was pulled less what was kept, in host memory."""
        assert copy in self._differences, copy.name
        return self._memory[copy]

    def drop_copies(self, copies: Iterable[ShardCopy]) -> None:
        """They were merged: another merge needs another push."""
        for copy in copies:
            self._kept.discard(copy)
            self._differences.discard(copy)


def _allocate_copies(device: Device, copies: list[ShardCopy]) -> dict[ShardCopy, torch.Tensor]:
    sizes = [copy.view.numel() for copy in copies]
    parts = device.allocate_host(sum(sizes)).split(sizes)
    return {copy: part.view(copy.view.shape) for copy, part in zip(copies, parts, strict=True)}
