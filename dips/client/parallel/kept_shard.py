"""A copy of this rank's shard as it was pushed, kept for the merge that follows under `overlap: full`.

    keep_copies       at the push: copies the tensors
    subtract_kept     when a version has arrived on all ranks: pulled − kept, in the memory of the kept copy. Where a
                      version lies in place in the shard, a thread does it beside training
    difference        in the merge: the values to be added to the tensor

So a merge reads one array of host memory beside the tensor, as an install does, and sends as many bytes to a device.
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
        self._kept: set[ShardCopy] = set()  # whose memory holds the kept copy
        self._differences: set[ShardCopy] = set()  # whose memory holds the difference

    @property
    def allocated_numel(self) -> int:
        """The elements of 4 B that are allocated."""
        return sum(memory.numel() for memory in self._memory.values())

    def keep_copies(self, copies: Iterable[ShardCopy], all_copies: Iterable[ShardCopy]) -> None:
        """Copy the present values of the tensors in `copies`; `all_copies` are all that may ever be kept."""
        if not self._memory:
            self._memory = _allocate_copies(self._device, list(all_copies))
        with self._device.ordered_copies():
            for copy in copies:
                read_tensor(self._device, copy.view, self._memory[copy])
                self._kept.add(copy)
                self._differences.discard(copy)
            self._device.synchronize()

    def move_copies(self, copies: Iterable[ShardCopy]) -> None:
        """Rebind to `copies` after the framework's tensors have moved: the same in the same order, or all are
        dropped.
        """
        moved = list(copies)
        if len(moved) != len(self._memory):
            self._memory, self._kept, self._differences = {}, set(), set()
            return
        new = dict(zip(self._memory, moved, strict=True))
        self._memory = {new[copy]: memory for copy, memory in self._memory.items()}
        self._kept, self._differences = ({new[copy] for copy in some} for some in (self._kept, self._differences))

    def holds(self, copies: Iterable[ShardCopy]) -> bool:
        """Return whether all of these were kept and none was merged since."""
        return all(copy in self._kept or copy in self._differences for copy in copies)

    def subtract_kept(self, copies: Iterable[ShardCopy]) -> None:
        """Turn each kept copy once into `alpha` · (pulled − kept); may be called in any thread."""
        for copy in copies:
            if copy in self._kept:
                memory = self._memory[copy].numpy()
                np.subtract(copy.host.numpy(), memory, out=memory)  # not torch, which would start threads
                if self.alpha != 1.0:
                    np.multiply(memory, np.float32(self.alpha), out=memory)
                self._kept.discard(copy)
                self._differences.add(copy)

    def difference(self, copy: ShardCopy) -> torch.Tensor:
        """Return pulled − kept of a copy, in host memory."""
        assert copy in self._differences, copy.name
        return self._memory[copy]

    def drop_copies(self, copies: Iterable[ShardCopy]) -> None:
        """Forget copies that were merged: another merge needs another push."""
        for copy in copies:
            self._kept.discard(copy)
            self._differences.discard(copy)


def _allocate_copies(device: Device, copies: list[ShardCopy]) -> dict[ShardCopy, torch.Tensor]:
    sizes = [copy.view.numel() for copy in copies]
    parts = device.allocate_host(sum(sizes)).split(sizes)
    return {copy: part.view(copy.view.shape) for copy, part in zip(copies, parts, strict=True)}
