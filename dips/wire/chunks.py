"""Ranges of parameters: how a rank says what it holds, how it is cut into chunks, whether all of it is there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dips.codecs import DTYPES, ITEM_BYTES, UPDATE_BLOCK, Codec, Dtype
from dips.dataclass import dataclass
from dips.errors import LocalProtocolError
from dips.protocol.manifest import Manifest
from dips.wire.frame import BadFrame

# ---- chunks ---------------------------------------------------------------------------------------------------------
# Ranges of parameters: how a rank says what it holds, how it is cut into chunks, whether all of it is there.
#
# A layer is a list of parameters; a range is a piece of one parameter's flattened elements, so a rank sends what it
# holds and nobody gathers (docs/protocol.md#transfers).


MOST_PROBLEMS = 5  # lines of an error that a person reads


class Range(NamedTuple):
    """`length` elements of one parameter from element `offset` on, as fp32; a chunk is one of at most chunk_bytes."""

    layer: int  # index in the manifest
    param: int  # index in the layer
    offset: int
    length: int

    @property
    def dtype(self) -> Dtype:
        """The data type in which this range is encoded on the wire."""
        return Codec.FP32.dtype

    @property
    def depth(self) -> int:
        """How many updates follow one another; 0: it is no update."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the wire."""
        return self.length * ITEM_BYTES

    def cut(self, most: int) -> Self:
        """Its beginning of `most` elements, which are whole blocks; itself if it is not longer."""
        return self if self.length <= most else type(self)(*self[:3], most)


class EncodedRange(Range):
    """A range that travels in another dtype, or as updates: `range_type` makes a class for each."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return (self.depth or 1) * self.dtype.count_bytes(self.offset, self.length)

    def cut(self, most: int) -> Self:
        """An update's ends with a block of the parameter: one that is cut in two would travel with two steps."""
        return Range.cut(self, most + -(self.offset + most) % UPDATE_BLOCK if self.depth else most)


@cache
def range_type(dtype: Dtype, depth: int = 0) -> type[Range]:
    """The class of ranges whose chunks have this dtype and, of a pull that brings updates, so many of them."""
    if (dtype, depth) == (Codec.FP32.dtype, 0):
        return Range
    name = f"{dtype.codec.name.title()}{'Update' * depth}Range"
    return type(name, (EncodedRange,), {"__slots__": (), "dtype": dtype, "depth": depth})


def pulled_range_type(number: int, depth: int) -> type[Range]:
    """The class of a pull's chunks, parameters or updates, as a WELCOME says; raise BadFrame if it is not known."""
    dtype = DTYPES.get(number)
    if dtype is None or not (1 <= depth <= dtype.codec.updates if dtype.update else number == depth == 0):
        raise BadFrame("message", f"chunks of {depth} updates of dtype {number} are not known")
    return range_type(dtype, depth)


def encode_ranges(dtype: Dtype, pieces: Iterable[Range]) -> tuple[Range, ...]:
    """The same ranges, of a push's chunks in this dtype."""
    return tuple(itertools.starmap(range_type(dtype), pieces))


class Field(NamedTuple):
    """One parameter as the layer's flat array holds it."""

    name: str
    start: int  # element of the layer's flat array
    numel: int
    block: int = 0  # of the layer's updates, its first


class LayerLayout:
    """Where every range of some layers lies; it depends on the manifest alone."""

    def __init__(self, manifest: Manifest, layers: Iterable[int]) -> None:
        self.fields: dict[tuple[int, int], Field] = {}
        self.numel: dict[int, int] = {}  # of each layer
        for index in layers:
            layer = manifest.layers[index]
            self.numel[index] = layer.numel
            block = 0
            for k, (parameter, start) in enumerate(zip(layer.parameters, layer.param_offsets(), strict=True)):
                self.fields[index, k] = Field(parameter.name, start, parameter.numel, block)
                block += -(-parameter.numel // UPDATE_BLOCK)

    @property
    def nbytes(self) -> int:
        return sum(self.numel.values()) * ITEM_BYTES

    def whole_layers(self) -> list[Range]:
        """Every parameter as one range."""
        return [Range(layer, param, 0, field.numel) for (layer, param), field in self.fields.items()]

    def place_range(self, piece: Range) -> tuple[int, int]:
        """Return begin and end of a range in its layer's flat array, in elements."""
        begin = self.fields[piece.layer, piece.param].start + piece.offset
        return begin, begin + piece.length

    def describe_outside(self, pieces: Iterable[Range]) -> str | None:
        """Describe the first range that does not lie in these layers, or return None."""
        for piece in pieces:
            field = self.fields.get((piece.layer, piece.param))
            if field is None:
                return f"layer {piece.layer} parameter {piece.param} is not held here"
            if piece.length < 1 or piece.offset + piece.length > field.numel:
                return (
                    f"{field.name}: elements {piece.offset} to {piece.offset + piece.length} were named, "
                    f"it has {field.numel}"
                )
        return None

    def describe_misfit(self, pieces: Sequence[Range]) -> str | None:
        """Describe why these ranges cannot be one rank's part of these layers, or return None."""
        if (outside := self.describe_outside(pieces)) is not None:
            return outside
        named, most = sum(piece.length for piece in pieces), sum(self.numel.values())
        return f"{named} elements were named, the layers here have {most}" if named > most else None

    def place_blocks(self, piece: Range) -> slice:
        """The blocks that a range touches, among those of its layer's updates: each parameter begins a block."""
        first = self.fields[piece.layer, piece.param].block
        end = piece.offset + piece.length
        return slice(first + piece.offset // UPDATE_BLOCK, first - (-end // UPDATE_BLOCK))


def split_chunks(pieces: Iterable[Range], chunk_bytes: int) -> Iterator[Range]:
    """Cut ranges into chunks, in order: as many elements as `chunk_bytes` of fp32 hold, however they are spelled."""
    most = chunk_bytes // ITEM_BYTES
    for piece in pieces:
        layer, param, offset, length = piece
        for begin in range(0, length, most):
            yield type(piece)(layer, param, offset + begin, min(most, length - begin))


def describe_uncovered(layout: LayerLayout, claims: Mapping[str, Sequence[Range]]) -> list[str]:
    """Describe where claims (owner → ranges inside the layout) overlap or leave gaps; [] if each element has one owner.

    At most MOST_PROBLEMS lines. Cost: sorts the ranges of each parameter.
    """
    owned: dict[tuple[int, int], list[tuple[int, int, str]]] = {key: [] for key in layout.fields}
    for who, pieces in claims.items():
        for piece in pieces:
            owned[piece.layer, piece.param].append((piece.offset, piece.length, who))
    problems = [line for key, spans in owned.items() for line in _find_problems(layout.fields[key], sorted(spans))]
    if len(problems) > MOST_PROBLEMS:
        return [*problems[:MOST_PROBLEMS], f"and {len(problems) - MOST_PROBLEMS} more"]
    return problems


def _find_problems(field: Field, spans: list[tuple[int, int, str]]) -> Iterator[str]:
    at, owner = 0, ""  # everything before `at` is owned; `owner` reaches farthest
    for offset, length, who in spans:
        if offset > at:
            yield f"{field.name}: elements {at} to {offset} come from no rank"
        elif offset < at:
            yield f"{field.name}: elements {offset} to {min(at, offset + length)} come from {owner} and from {who}"
        if offset + length > at:
            at, owner = offset + length, who
    if at < field.numel:
        yield f"{field.name}: elements {at} to {field.numel} come from no rank"


# ---- shares ---------------------------------------------------------------------------------------------------------
# The ranges that one rank holds or wants at one lane of one slave, with its own arrays.


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
