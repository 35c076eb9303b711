"""Checksums of parameters over the bits of their fp32 values, in one pass, block by block."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dips.client.parallel.blocks import split_together
from dips.client.parallel.devices import Device

WRAP = 1 << 64
COPIES = 4  # temporaries of a block's size at once: its bits in fp32, twice as much for int64 sums, one spare


def sum_bits(parts: Iterable[tuple[int, torch.Tensor]], device: Device) -> int:
    """Sum the fp32 bits of tensors, each times its weight, modulo 2^64 as a signed number; sums over ranks can be
    added.

    Takes no more memory on the device than one of its blocks, and waits for the device once.
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
    """Wrap an integer to the value that an int64 would hold."""
    return (total + WRAP // 2) % WRAP - WRAP // 2
