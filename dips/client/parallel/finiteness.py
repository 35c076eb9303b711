"""Checks that tensors are finite, in one pass over each, block by block; waits once for an accelerator.

On the host a sum of squares is faster than the extremes and equally safe: it is finite unless an element is not, or is
so large that its square overflows. In that case the block is checked again, by its extremes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dips.client.parallel.blocks import split_together
from dips.client.parallel.devices import Device


class FiniteCheck:
    """Accumulates whether blocks of tensors are finite."""

    def __init__(self, device: Device) -> None:
        self._device, self._suspect = device, False
        self._total: torch.Tensor | None = None  # over blocks on an accelerator: 0 if finite, else NaN

    def add_block(self, block: torch.Tensor) -> None:
        """Check a block of at most the device's block size; on an asynchronous device the check is only enqueued."""
        if block.device.type != "cpu":
            zero = _probe_extremes(block)
            self._total = zero if self._total is None else self._total + zero
        elif not math.isfinite(sum_squares(block)):
            self._suspect |= not bool(_probe_extremes(block) == 0)

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Check a whole tensor."""
        for (block,) in split_together(self._device.block_items, tensor):
            self.add_block(block)

    @property
    def is_finite(self) -> bool:
        """Whether everything checked is finite; waits for the device."""
        return not self._suspect and (self._total is None or bool(self._total == 0))


def find_not_finite(named: Sequence[tuple[str, torch.Tensor]], device: Device) -> str:
    """Return the first name whose tensor holds a NaN or an infinity; "" if none does."""
    checks = [FiniteCheck(device) for _ in named]
    for check, (_, tensor) in zip(checks, named, strict=True):  # enqueue all before waiting for the first
        check.add_tensor(tensor)
    return next((name for (name, _), check in zip(named, checks, strict=True) if not check.is_finite), "")


def sum_squares(block: torch.Tensor) -> float:
    """Return the sum of squares of a block on the host, or its norm if it is not contiguous fp32; infinite or NaN if
    not finite.
    """
    if block.dtype is torch.float32 and block.is_contiguous():
        flat = block.view(-1)
        return float(torch.dot(flat, flat))
    return float(torch.linalg.vector_norm(block, dtype=torch.float32))


def _probe_extremes(block: torch.Tensor) -> torch.Tensor:
    """Return a scalar tensor that is 0 if the block is finite, else NaN: an infinity is an extreme, and a NaN spreads
    to both.
    """
    low, high = torch.aminmax(block)
    return low.float() * 0 + high.float() * 0
