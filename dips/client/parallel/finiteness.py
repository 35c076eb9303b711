"""Whether tensors are finite, in one pass over each, a block at a time; waits once for an accelerator.

On the host a sum of squares is faster than the extremes, and as good: finite unless something is not, or is so large
that its square overflows. Then the tensor is looked at again, by its extremes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dips.client.parallel.blocks import split_together
from dips.client.parallel.devices import Device


class FiniteCheck:
    """Looks at blocks of tensors."""

    def __init__(self, device: Device) -> None:
        self._device, self._suspect = device, False
        self._total: torch.Tensor | None = None  # of what lies on an accelerator: 0, or NaN

    def add_block(self, block: torch.Tensor) -> None:
        """Look at a block, of at most the device's size; enqueues only, where the device is asynchronous."""
        if block.device.type != "cpu":
            zero = _probe_extremes(block)
            self._total = zero if self._total is None else self._total + zero
        elif not math.isfinite(sum_squares(block)):
            self._suspect |= not bool(_probe_extremes(block) == 0)

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Look at all of a tensor."""
        for (block,) in split_together(self._device.block_items, tensor):
            self.add_block(block)

    @property
    def is_finite(self) -> bool:
        """Whether all of it is; waits for the device."""
        return not self._suspect and (self._total is None or bool(self._total == 0))


def find_not_finite(named: Sequence[tuple[str, torch.Tensor]], device: Device) -> str:
    """The first name whose tensor holds a NaN or an infinity; "" if none does."""
    checks = [FiniteCheck(device) for _ in named]
    for check, (_, tensor) in zip(checks, named, strict=True):  # all are enqueued before the first is waited for
        check.add_tensor(tensor)
    return next((name for (name, _), check in zip(named, checks, strict=True) if not check.is_finite), "")


def sum_squares(block: torch.Tensor) -> float:
    """Of a block on the host; infinite or NaN if that is not finite."""
    if block.dtype is torch.float32 and block.is_contiguous():
        flat = block.view(-1)
        return float(torch.dot(flat, flat))
    return float(torch.linalg.vector_norm(block, dtype=torch.float32))


def _probe_extremes(block: torch.Tensor) -> torch.Tensor:
    """0 or NaN, of no dims: the extremes hold an infinity, and are NaN if anything is."""
    low, high = torch.aminmax(block)
    return low.float() * 0 + high.float() * 0
