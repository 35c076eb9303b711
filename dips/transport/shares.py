"""The ranges that one rank holds or wants at one lane of one slave, with its own arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dips.codecs import ITEM_BYTES
from dips.dataclass import dataclass
from dips.errors import LocalProtocolError
from dips.wire.chunks import Range

F32 = npt.NDArray[np.float32]
CUT_ITEMS = 1024  # elements; shorter pieces are never cut


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
    """Pieces, looked up by chunks within them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.ranges = tuple(piece.range for piece in pieces)
        self.nbytes = sum(r.nbytes for r in self.ranges)
        self._bytes: dict[tuple[int, int], list[tuple[int, int, memoryview]]] = {}  # → (first element, end, bytes)
        for piece in pieces:
            check_piece(piece)
            held = piece.offset, piece.offset + piece.length, piece.array.view(np.uint8).data
            self._bytes.setdefault((piece.layer, piece.param), []).append(held)

    def view_chunk(self, chunk: Range) -> memoryview | None:
        """Return the bytes of a chunk in the caller's array; None if it is in no piece."""
        layer, param, offset, length = chunk
        for first, end, held in self._bytes.get((layer, param), ()):
            if first <= offset and offset + length <= end:
                return held[(offset - first) * ITEM_BYTES : (offset + length - first) * ITEM_BYTES]
        return None


def check_piece(piece: Piece) -> None:
    """Raise LocalProtocolError unless the piece's array has its length, dtype and layout."""
    array = piece.array
    if array.dtype != np.float32 or array.ndim != 1 or array.size != piece.length or not array.flags.c_contiguous:
        raise LocalProtocolError(
            f"layer {piece.layer} parameter {piece.param}: expected {piece.length} contiguous float32, "
            f"got {array.dtype} of shape {array.shape}"
        )


def deal_pieces(pieces: Iterable[Piece], lanes: int) -> list[list[Piece]]:
    """Deal pieces to lanes, the same number of elements to each; a piece that crosses a border is cut there.

    One embedding may be half of a shard: whole pieces would leave lanes idle. Borders are at multiples of CUT_ITEMS of
    a piece, so a few small parameters stay on one lane.
    """
    pieces = list(pieces)
    share = sum(piece.length for piece in pieces) / lanes
    hands: list[list[Piece]] = [[] for _ in range(lanes)]
    dealt = 0
    for piece in pieces:
        at = 0
        while at < piece.length:
            lane = min(int(dealt / share), lanes - 1)
            room = piece.length - at if lane == lanes - 1 else round((lane + 1) * share) - dealt
            take = min(piece.length - at, max(CUT_ITEMS, -(-room // CUT_ITEMS) * CUT_ITEMS))
            hands[lane].append(_cut_piece(piece, at, take))
            at += take
            dealt += take
    return hands


def _cut_piece(piece: Piece, at: int, length: int) -> Piece:
    if length == piece.length:
        return piece
    return Piece(piece.layer, piece.param, piece.offset + at, length, piece.array[at : at + length])
