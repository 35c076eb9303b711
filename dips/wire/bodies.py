"""Bodies of chunks: elements in a push's codec, and the updates of a pull.

A body of blocks is all steps, then all codes: both are read as flat arrays. Of an update the steps are those of a
*parameter's* blocks that the range touches (docs/protocol.md#updates). Added in their order, updates make the newer
version bit for bit. Nothing here knows versions or sockets.
"""

from __future__ import annotations

import numpy as np

from dips.codecs import ITEM_BYTES, Codec
from dips.quantisers import F32, QUANTISERS, U8, add_codes, quantise
from dips.wire.chunks import Range
from dips.wire.frame import BadFrame, Buffer

_LARGEST = np.finfo(np.float32).max


def encode(codec: Codec, values: F32) -> Buffer:
    """The body of a push's chunk; of fp32 the elements' own memory."""
    if not codec.lossy:
        return values.view(np.uint8).data
    out = np.empty(codec.dtype.count_bytes(0, values.size), np.uint8)
    head = ITEM_BYTES * codec.count_blocks(values.size)
    with np.errstate(all="ignore"):
        quantise(codec, values, out[:head].view(np.float32), out[head:].view(QUANTISERS[codec].codes))
    return out.data


def put(codec: Codec, body: Buffer, target: F32) -> None:
    """Bring a push's chunk to its place; a lossy one is added to the base that lies there."""
    raw = np.frombuffer(body, np.uint8)
    if not codec.lossy:
        np.copyto(target.view(np.uint8), raw)
        return
    steps, codes = _split_body(codec, raw, target.size)
    with np.errstate(all="ignore"):
        add_codes(codec, codes.view(QUANTISERS[codec].codes), steps, target)


def decode(codec: Codec, body: Buffer, length: int) -> F32:
    """The `length` elements that a push's chunk stands for."""
    out = np.zeros(length, np.float32)
    put(codec, body, out)
    return out


def check_steps(codec: Codec, body: Buffer, length: int) -> None:
    """Raise BadFrame if a step of a push's chunk of `length` elements could bring what is not finite."""
    if not codec.block:
        return
    steps, _ = _split_body(codec, np.frombuffer(body, np.uint8), length)
    wrong = ~((steps >= 0) & (steps <= _LARGEST / (codec.largest + 1)))  # NaN compares false; −128 and −8 can be sent
    if wrong.any():
        first = int(wrong.argmax())
        raise BadFrame("step", f"expected finite steps from 0 on, got {steps[first]} for block {first} of a chunk")


def put_pulled(chunk: Range, body: Buffer, target: F32) -> None:
    """Bring a pull's chunk to its place; its updates are added, one by one, to the older version that lies there."""
    if not chunk.depth:
        put(chunk.dtype.codec, body, target)
        return
    raw, each = np.frombuffer(body, np.uint8), chunk.nbytes // chunk.depth
    with np.errstate(all="ignore"):
        for number in range(chunk.depth):
            _put_update(chunk, raw[number * each : (number + 1) * each], target)


def _put_update(chunk: Range, raw: U8, target: F32) -> None:
    """Put the elements of the range's first, partial block, then whole blocks, as in a push."""
    codec = chunk.dtype.codec
    first = min(-chunk.offset % codec.block, chunk.length) if codec.block else 0
    steps, codes = _split_body(codec, raw, first, chunk.length - first)
    codes = codes.view(QUANTISERS[codec].codes)
    begun = codec.count_blocks(first)
    if first:
        add_codes(codec, codes[:first], steps[:begun], target[:first])
    add_codes(codec, codes[first:], steps[begun:], target[first:])


def _split_body(codec: Codec, raw: U8, *lengths: int) -> tuple[F32, U8]:
    """The steps and the codes' bytes of a body that holds so many elements, and so many more in blocks of their own."""
    head = ITEM_BYTES * sum(map(codec.count_blocks, lengths))
    return np.frombuffer(raw[:head].tobytes(), np.float32), raw[head:]  # it may begin at an odd address
