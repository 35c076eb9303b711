"""What a pull brings to a rank that holds an older version: one update, or two one after the other.

An update is the difference between two versions as the slaves made it (docs/protocol.md#updates): bf16, or int8 with a
step for each block of 256 of a *parameter*'s elements, so that a range that begins within a block has that block's step
too. Added in their order, updates make the newer version bit for bit.

    bf16   2 B an element
    int8   1 B, and 4 B for each block that the range touches: at first all steps, then all elements

What must stay true: the same fp32 operations in the same order as dips/outer/reference.py. Nothing here knows versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt

from dips.dataclass import dataclass
from dips.wire.chunks import Range
from dips.wire.codecs import CODECS
from dips.wire.frame import BLOCK, ITEM_BYTES, BadFrame, Buffer, Dtype

F32 = npt.NDArray[np.float32]


def blocks_of(piece: Range) -> range:
    """The blocks of its parameter that a range touches."""
    return range(piece.offset // BLOCK, -(-(piece.offset + piece.length) // BLOCK))


class UpdateRange(Range):
    """A range that travels as one update."""

    __slots__ = ()

    @property
    def depth(self) -> int:
        """How many updates follow one another."""
        return 1

    def cut(self, most: int) -> Self:
        """As much more as ends with a block of the parameter: one that is cut in two would travel with two steps."""
        return Range.cut(self, most + -(self.offset + most) % BLOCK)


class Bf16UpdateRange(UpdateRange):
    """A range as a bf16 update."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return 2 * self.depth * self.length

    @property
    def dtype(self) -> Dtype:
        return Dtype.BF16_UPDATE


class Int8UpdateRange(UpdateRange):
    """A range as an int8 update."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return self.depth * (self.length + ITEM_BYTES * len(blocks_of(self)))

    @property
    def dtype(self) -> Dtype:
        return Dtype.INT8_UPDATE


class TwoInt8UpdatesRange(Int8UpdateRange):
    """A range as two int8 updates."""

    __slots__ = ()

    @property
    def depth(self) -> int:
        return 2


@dataclass(frozen=True, slots=True)
class UpdateSpelling:
    """How the chunks of one pull are spelled."""

    range: type[UpdateRange]
    add_one: Callable[[Buffer, UpdateRange, F32], None]

    def add_updates(self, body: Buffer, chunk: Range, target: F32) -> None:
        """Add a chunk's updates to what `target` holds of the older version."""
        spelled = self.range(*chunk)
        each = spelled.nbytes // spelled.depth
        for number in range(spelled.depth):
            self.add_one(memoryview(body)[number * each : (number + 1) * each], spelled, target)


def spelling_of(dtype: int, depth: int) -> UpdateSpelling | None:
    """What a WELCOME says of a pull's chunks; None: parameters. Raise BadFrame if this release does not know it."""
    if (dtype, depth) == (Dtype.FP32, 0):
        return None
    try:
        return SPELLINGS[dtype, depth]
    except KeyError:
        raise BadFrame("message", f"chunks of {depth} updates of dtype {dtype} are not known") from None


def range_of(dtype: int, depth: int) -> type[Range]:
    """How ranges are counted that travel so."""
    spelling = spelling_of(dtype, depth)
    return Range if spelling is None else spelling.range


def _add_bf16(body: Buffer, chunk: UpdateRange, target: F32) -> None:
    CODECS["bf16"].put(body, target)


def _add_int8(body: Buffer, chunk: UpdateRange, target: F32) -> None:
    """What lies in the range's first block goes first; from there on blocks are whole, as in a push."""
    raw = np.frombuffer(body, np.uint8)
    count = ITEM_BYTES * len(blocks_of(chunk))
    first = min(-chunk.offset % BLOCK, chunk.length)
    if first:
        step = np.frombuffer(raw[:ITEM_BYTES].tobytes(), np.float32)
        with np.errstate(all="ignore"):
            target[:first] += raw[count : count + first].view(np.int8).astype(np.float32) * step
    if first < chunk.length:
        steps, elements = raw[ITEM_BYTES if first else 0 : count], raw[count + first :]
        CODECS["int8"].put(np.concatenate((steps, elements)).data, target[first:])


SPELLINGS = {
    (int(Dtype.BF16_UPDATE), 1): UpdateSpelling(Bf16UpdateRange, _add_bf16),
    (int(Dtype.INT8_UPDATE), 1): UpdateSpelling(Int8UpdateRange, _add_int8),
    (int(Dtype.INT8_UPDATE), 2): UpdateSpelling(TwoInt8UpdatesRange, _add_int8),
}
