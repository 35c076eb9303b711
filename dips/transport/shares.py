"""What one rank holds or wants at one lane of one slave: pieces of its own arrays, and where a chunk of them lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dips.errors import LocalProtocolError
from dips.wire.chunks import Range
from dips.wire.frame import ITEM_BYTES

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Piece:
    """A range that this rank holds (push) or wants (pull), and its elements."""

    layer: int  # index in the manifest
    param: int  # index in the layer
    offset: int  # elements from the full parameter's first
    length: int  # elements
    array: F32  # contiguous, 1-D, `length` elements

    @property
    def range(self) -> Range:
        return Range(self.layer, self.param, self.offset, self.length)


class Share:
    """Pieces, found by the chunks that lie in them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.ranges = tuple(piece.range for piece in pieces)
        self.nbytes = sum(r.nbytes for r in self.ranges)
        self._pieces: dict[tuple[int, int], list[Piece]] = {}
        for piece in pieces:
            check(piece)
            self._pieces.setdefault((piece.layer, piece.param), []).append(piece)

    def view(self, chunk: Range) -> memoryview | None:
        """The bytes of a chunk in the caller's array; None if it lies in no piece."""
        for piece in self._pieces.get((chunk.layer, chunk.param), ()):
            begin = (chunk.offset - piece.offset) * ITEM_BYTES
            if begin >= 0 and chunk.offset + chunk.length <= piece.offset + piece.length:
                return piece.array.view(np.uint8)[begin : begin + chunk.nbytes].data
        return None


def check(piece: Piece) -> None:
    """Raise LocalProtocolError unless the piece's array is what the piece says."""
    array = piece.array
    if array.dtype != np.float32 or array.ndim != 1 or array.size != piece.length or not array.flags.c_contiguous:
        raise LocalProtocolError(
            f"layer {piece.layer} parameter {piece.param}: expected {piece.length} contiguous float32, "
            f"got {array.dtype} of shape {array.shape}"
        )


def deal(pieces: Iterable[Piece], lanes: int) -> list[list[Piece]]:
    """Deal pieces to lanes, each to the one that has the fewest bytes so far."""
    hands: list[list[Piece]] = [[] for _ in range(lanes)]
    load = [0] * lanes
    for piece in pieces:
        lane = load.index(min(load))
        hands[lane].append(piece)
        load[lane] += piece.length
    return hands
