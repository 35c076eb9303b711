"""Chunks of a pull that carry updates: their dtype, and how one is cut out of the updates in memory."""

from __future__ import annotations

import numpy as np

from dips.outer.updates import Update
from dips.wire.chunks import LayerLayout, Range
from dips.wire.frame import Dtype


def dtype_of(updates: tuple[Update, ...]) -> Dtype:
    """Return the dtype of a stream's chunks that carry these updates; without updates, of parameters."""
    if not updates:
        return Dtype.FP32
    return Dtype.INT8_UPDATE if updates[0].steps else Dtype.BF16_UPDATE


def cut_updates(layout: LayerLayout, updates: tuple[Update, ...], chunk: Range) -> bytes:
    """Return a chunk's body: for each update, the scales of the blocks that it touches, and its elements."""
    begin, end = layout.place_range(chunk)
    blocks, parts = layout.place_blocks(chunk), list[memoryview]()
    for update in updates:
        if update.steps:
            parts.append(update.steps[chunk.layer][blocks].view(np.uint8).data)
        parts.append(update.codes[chunk.layer][begin:end].view(np.uint8).data)
    return b"".join(parts)
