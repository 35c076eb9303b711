"""A checksum of θ as the ranks of a job hold it together, whatever the layout: each element counts on one rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

WRAP = 1 << 64


def sum_bits(parts: Iterable[tuple[int, torch.Tensor]]) -> int:
    """Sum the fp32 bits of tensors, each times its weight, modulo 2^64 and as a signed number; adds up over ranks."""
    total = 0
    for weight, part in parts:
        bits = part.detach().to(torch.float32).contiguous().view(torch.int32)
        total += weight * int(bits.sum(dtype=torch.int64))
    return wrap_sum(total)


def wrap_sum(total: int) -> int:
    """As an int64 would hold it."""
    return (total + WRAP // 2) % WRAP - WRAP // 2
