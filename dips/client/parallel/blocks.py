"""Passes over tensors block by block, within bounded memory: checksums of parameters, checks that they are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from dips.client.parallel.devices import Device

# ---- blocks ---------------------------------------------------------------------------------------------------------


def split_together(items: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors of one shape, [rows, cols] or flat, into the same views of at most `items` elements each."""
    if not tensors[0].numel():
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(items) for tensor in tensors), strict=True)
    else:
        yield from split_rows(items, *tensors)


def split_rows(items: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors as `split_together`, at places that depend on the shape alone, so that two ranks make the
    same cuts.
    """
    if not tensors[0].numel():
        return
    rows = max(1, items // tensors[0].shape[-1])
    for some in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        yield from zip(*(tensor.split(items, dim=-1) for tensor in some), strict=True)


def shaped_like(scratch: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return the beginning of a flat tensor as a view of the block's shape."""
    return scratch[: block.numel()].view(block.shape)


# ---- checksum -------------------------------------------------------------------------------------------------------


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


# ---- finiteness -----------------------------------------------------------------------------------------------------
# On the host a sum of squares is faster than the extremes and equally safe: it is finite unless an element is not, or
# is so large that its square overflows. In that case the block is checked again, by its extremes.


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
