"""Tensors a block at a time: what is computed on the way needs room for one block only, and finds it in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def split_together(items: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors of one shape, [rows, cols] or flat, into the same views of at most `items` elements each."""
    if not tensors[0].numel():
        return
    if tensors[0].numel() <= items:
        yield tensors
    elif all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(items) for tensor in tensors), strict=True)
    else:
        yield from split_rows(items, *tensors)


def split_rows(items: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """As `split_together`, with cuts that depend on the shape alone: two ranks make the same."""
    if not tensors[0].numel():
        return
    rows = max(1, items // tensors[0].shape[-1])
    for some in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        yield from zip(*(tensor.split(items, dim=-1) for tensor in some), strict=True)


def shaped_like(scratch: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """The beginning of a flat tensor, in the shape of a block."""
    return scratch[: block.numel()].view(block.shape)
