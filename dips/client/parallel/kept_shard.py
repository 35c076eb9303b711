"""This rank's shard as it was when it was pushed, kept for the merge that follows under `overlap: full`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dips.client.parallel.devices import Device


@dataclass(frozen=True, eq=False)
class ShardCopy:
    """One copy from host memory to a tensor of the framework."""

    name: str  # of the parameter
    view: torch.Tensor  # the framework's
    host: torch.Tensor
    rounds: bool = False  # the tensor has fewer bits than what is pulled, and is what is pushed
    key: tuple[int, int, int] = (-1, -1, -1)  # layer, parameter, block; of a parameter's own memory


class KeptShard:
    """Copies of the framework's tensors in host memory, allocated at the first `keep_copies` and reused."""

    def __init__(self, device: Device) -> None:
        self._device, self.alpha = device, 1.0
        self._kept: dict[ShardCopy, torch.Tensor] = {}

    def allocate_copies(self, copies: Iterable[ShardCopy]) -> None:
        """Have memory for all of `copies`."""
        if not self._kept:
            self._kept = {copy: self._device.allocate_host(copy.view.numel()) for copy in copies}

    def keep_copies(self, copies: Iterable[ShardCopy]) -> None:
        """Copy what the tensors of `copies` hold now."""
        with self._device.ordered_copies():
            for copy in copies:
                kept = self._kept[copy]
                kept.view(copy.view.shape).copy_(copy.view, non_blocking=True)
            self._device.synchronize()

    def move_copies(self, copies: Iterable[ShardCopy]) -> None:
        """The framework's tensors lie elsewhere: `copies` are the same, in the same order, or nothing is kept."""
        moved = list(copies)
        self._kept = dict(zip(moved, self._kept.values(), strict=True)) if len(moved) == len(self._kept) else {}

    def is_finite(self, copies: Iterable[ShardCopy]) -> bool:
        """Whether neither the tensors nor what was kept of them hold a NaN or an infinity."""
        return bool(self._kept) and all(
            bool(torch.isfinite(copy.view).all()) and bool(torch.isfinite(self._kept[copy]).all()) for copy in copies
        )

    def pulled_difference(self, copy: ShardCopy) -> torch.Tensor:
        """`alpha` times what was pulled less what was kept, on the device of the framework's tensor."""
        kept = self._kept[copy].view(copy.view.shape)
        return self._weigh(copy.host - kept).to(copy.view.device)

    def difference_on_device(self, copy: ShardCopy) -> torch.Tensor:
        """As `pulled_difference`, subtracted on the device so that the calling thread does not wait for the copies."""
        kept, device = self._kept[copy].view(copy.view.shape), copy.view.device
        return self._weigh(copy.host.to(device, non_blocking=True) - kept.to(device, non_blocking=True))

    def _weigh(self, difference: torch.Tensor) -> torch.Tensor:
        return difference if self.alpha == 1.0 else difference.mul_(self.alpha)
