"""Copies between host memory and the framework's tensors, block by block, using one block of memory on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dips.client.parallel.blocks import shaped_like, split_together
from dips.client.parallel.devices import Device
from dips.client.parallel.finiteness import FiniteCheck
from dips.client.parallel.shard_copies import ShardCopy


def read_tensor(device: Device, view: torch.Tensor, host: torch.Tensor) -> None:
    """Copy a tensor into host memory; on an asynchronous device the copy is only enqueued."""
    if not device.accelerated or view.dtype is torch.float32:
        host.copy_(view, non_blocking=True)
        return
    for part, target in split_together(device.block_items, view, host):
        block = shaped_like(device.scratch, part)
        block.copy_(part)
        target.copy_(block, non_blocking=True)


def write_pulled(device: Device, copy: ShardCopy) -> None:
    """Write pulled values into the tensor; on an asynchronous device the copy is only enqueued."""
    if not device.accelerated or copy.view.dtype is torch.float32:
        copy.view.copy_(copy.host, non_blocking=True)
        return
    for view, host in split_together(device.block_items, copy.view, copy.host):  # a cast on the host would block
        block = shaped_like(device.scratch, view)
        block.copy_(host, non_blocking=True)
        view.copy_(block)


def write_merged(
    device: Device, copy: ShardCopy, difference: torch.Tensor, remainder: torch.Tensor | None, check: FiniteCheck
) -> None:
    """Add a difference to the tensor in fp32, and store the rounding error in `remainder`."""
    parts = (copy.view, difference) if remainder is None else (copy.view, difference, remainder)
    in_place = copy.view.dtype is torch.float32 and not device.accelerated
    for view, added, *rest in split_together(device.block_items, *parts):
        if in_place:
            view.add_(added)
        else:
            _add_by_scratch(device, view, added, rest)
        check.add_block(view)


def _add_by_scratch(device: Device, view: torch.Tensor, added: torch.Tensor, rest: Sequence[torch.Tensor]) -> None:
    block = shaped_like(device.scratch, view)
    block.copy_(added, non_blocking=True)
    if view.dtype is torch.float32:
        view.add_(block)
    else:
        block.add_(view)
        view.copy_(block)
    for rounded in rest:
        block.sub_(view)
        rounded.copy_(block, non_blocking=True)
