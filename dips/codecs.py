"""The table of codecs of pushes and pulls; frames, ranges, memory, `dips plan`, options and documents follow from it.

A lossy codec carries differences to a named version, never parameters: bf16 *of parameters* would round a norm's gain
near 1.0 to steps of 2^-8, and the outer changes of 1e-3 would vanish (docs/rationale.md#38). The rounding error of a
push is added to the next one: client/rank/feedback.py. Pulls of updates: outer/updates.py.

    fp32   exact
    bf16   error at most 2^-8 of the element (2^-134 below the smallest normal number)
    int8   whole steps of the block's max |x| / 127; error at most half a step
    int4   whole steps of the block's max |x| / 7; error at most half a step; two elements in a byte
    int2   −1, 0 or 1 times the block's max |x|; error at most half of that; four elements in a byte
    fp8    e4m3 numbers, in steps of the block's max |x| / 448: error at most 1/16 of the element or 2^-10 of a step,
           whichever is more

To add a codec: a row here, its two functions in quantisers.py, its bound in tests/codec_bounds.py; tests over
the table report anything else that is missing. No numpy here: the master and the agents read the table, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Self

ITEM_BYTES = 4  # bytes of an fp32 element, and of a block's step
OWED_BYTES = 8  # per parameter that a rank pushes, if any codec is lossy: base and error feedback in fp32


class Codec(StrEnum):
    """One codec.

    dtype         number in the header of a push's CHUNK
    bits          per element
    block         elements that share one fp32 step; 0: no steps
    largest       divisor of a block's largest |element| that gives the step
    updates       most updates in one pull, fewer bytes than the parameters; 0: for pushes only
    update_dtype  number in the header of an update's CHUNK
    """

    #       name  dtype bits block largest updates update_dtype
    FP32 = "fp32",    0,  32,    0,      1,      0,           0  # fmt: skip
    BF16 = "bf16",    1,  16,    0,      1,      1,           4  # fmt: skip
    INT8 = "int8",    2,   8,  256,    127,      2,           5  # fmt: skip
    INT4 = "int4",    3,   4,  128,      7,      0,           0  # fmt: skip
    FP8  = "fp8",     6,   8,  256,    448,      0,           0  # fmt: skip
    INT2 = "int2",    7,   2,   64,      1,      0,           0  # fmt: skip

    number: int
    bits: int
    block: int
    largest: int
    updates: int
    update_number: int

    def __new__(
        cls, name: str, number: int, bits: int, block: int, largest: int, updates: int, update_number: int
    ) -> Self:
        made = str.__new__(cls, name)
        made._value_ = name
        made.number, made.bits, made.block, made.largest = number, bits, block, largest
        made.updates, made.update_number = updates, update_number
        return made

    @property
    def lossy(self) -> bool:
        """Whether the codec carries differences to a base."""
        return self is not Codec.FP32

    @property
    def element_bytes(self) -> float:
        """Bytes per element, including its share of a step."""
        return self.bits / 8 + (ITEM_BYTES / self.block if self.block else 0)

    @property
    def dtype(self) -> Dtype:
        """The dtype of a push's chunks."""
        return DTYPES[self.number]

    @property
    def update_dtype(self) -> Dtype:
        """The dtype of an update's chunks; only for codecs with updates."""
        assert self.updates, f"{self} is for pushes only"
        return DTYPES[self.update_number]

    @property
    def tiniest(self) -> float:
        """The magnitude below which a block becomes zeros, because its step would not be a normal number."""
        return 2.0 ** max(-119, self.largest.bit_length() - 126)

    def count_blocks(self, length: int) -> int:
        """Return the number of steps of `length` elements; the last block may be short."""
        return -(-length // self.block) if self.block else 0

    def chunk_bytes(self, most: int) -> int:
        """Return the most fp32 bytes that one WANT of a push may ask for: whole blocks, so that no block is cut
        in two.
        """
        return most - most % (ITEM_BYTES * max(1, self.block)) or most


class Dtype(NamedTuple):
    """The content of a CHUNK, as its header says: a codec, and whether it carries updates."""

    number: int
    codec: Codec
    update: bool = False  # updates from the puller's base to its version

    @property
    def name(self) -> str:
        """The name for people."""
        return f"{self.codec}{' update' if self.update else ''}"

    @property
    def content(self) -> int:
        """The header's content field: 0 parameters, 1 differences to the granted base, 2 updates."""
        return 2 if self.update else int(self.codec.lossy)

    def count_bytes(self, offset: int, length: int) -> int:
        """Return the bytes on the wire of `length` elements of a parameter, starting at `offset`.

        A push's blocks begin with the chunk. An update's blocks begin with the parameter, so that any range can be cut
        out: a range that begins within a block includes that block's step.
        """
        codec, begins = self.codec, offset % self.codec.block if self.update and self.codec.block else 0
        return -(-length * codec.bits // 8) + ITEM_BYTES * codec.count_blocks(begins + length)

    def is_whole(self, nbytes: int) -> bool:
        """Return whether a body of `nbytes` can be a whole number of elements."""
        codec = self.codec
        if not codec.block:
            return nbytes % (codec.bits // 8) == 0
        if self.update:  # its range gives their number; the shortest is a step and an element
            return nbytes > ITEM_BYTES
        return not 1 <= nbytes % (ITEM_BYTES + codec.block * codec.bits // 8) <= ITEM_BYTES


DTYPES: Mapping[int, Dtype] = {
    **{codec.number: Dtype(codec.number, codec) for codec in Codec},
    **{codec.update_number: Dtype(codec.update_number, codec, update=True) for codec in Codec if codec.updates},
}
PULL_CODECS = tuple(codec for codec in Codec if codec.updates or not codec.lossy)
UPDATE_BLOCK = Codec.INT8.block  # block of every codec whose updates have blocks: slaves lay out steps by it
