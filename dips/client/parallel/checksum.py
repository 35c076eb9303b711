"""Checksums of parameters by the bits of their fp32 values, in one pass and a block at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dips.client.parallel.blocks import split_together
from dips.client.parallel.devices import Device

WRAP = 1 << 64
COPIES = 4  # blocks of a part at once, one for room: its bits in fp32, and twice as much where torch sums them as int64


def sum_bits(parts: Iterable[tuple[int, torch.Tensor]], device: Device) -> int:
    """Sum the fp32 bits of tensors, each times its weight, modulo 2^64 and as a signed number; adds up over ranks.

    Takes no more room on the device than one of its blocks, and waits for it once.
    """
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for weight, part in parts:
        for (block,) in split_together(device.block_items // COPIES, part.detach()):
            bits = block.to(torch.float32).contiguous().view(torch.int32)
            by_device.setdefault(part.device, []).append((weight, bits.sum(dtype=torch.int64)))
    total = 0
    for sums in by_device.values():
        numbers = torch.stack([one for _, one in sums]).tolist()
        total += sum(weight * number for (weight, _), number in zip(sums, numbers, strict=True))
    return wrap_sum(total)


def wrap_sum(total: int) -> int:
    """As an int64 would hold it."""
    return (total + WRAP // 2) % WRAP - WRAP // 2
