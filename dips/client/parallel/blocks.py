"""Processing of tensors block by block: temporaries need memory for one block only, and stay in the cache."""

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
