"""Chunks of parameters: where a range lies, how it is cut, whether all of it is there, and what a chunk's body is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dips.codecs import ITEM_BYTES, UPDATE_BLOCK, Codec
from dips.dataclass import dataclass
from dips.errors import LocalProtocolError
from dips.protocol.manifest import Manifest
from dips.quantisers import QUANTISERS, U8, add_codes, quantise
from dips.wire.frame import BadFrame, Buffer, Range

# ---- chunks ---------------------------------------------------------------------------------------------------------
# Ranges of parameters: how a rank says what it holds, how it is cut into chunks, whether all of it is there.
#
# A layer is a list of parameters; a range is a piece of one parameter's flattened elements, so a rank sends what it
# holds and nobody gathers (docs/protocol.md#transfers).


MOST_PROBLEMS = 5  # lines of an error that a person reads


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
        at, owner = max((at, owner), (offset + length, who))
    if at < field.numel:
        yield f"{field.name}: elements {at} to {field.numel} come from no rank"


# ---- shares ---------------------------------------------------------------------------------------------------------


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


# ---- bodies ---------------------------------------------------------------------------------------------------------
# Bodies of chunks: elements in a push's codec, and the updates of a pull.
#
# A body of blocks is all steps, then all codes: both are read as flat arrays. Of an update the steps are those of a
# *parameter's* blocks that the range touches (docs/protocol.md#updates). Added in their order, updates make the newer
# version bit for bit. Nothing here knows versions or sockets.


_LARGEST = np.finfo(np.float32).max


def encode_body(codec: Codec, values: F32) -> Buffer:
    """The body of a push's chunk; of fp32 the elements' own memory."""
    if not codec.lossy:
        return values.view(np.uint8).data
    out = np.empty(codec.dtype.count_bytes(0, values.size), np.uint8)
    head = ITEM_BYTES * codec.count_blocks(values.size)
    with np.errstate(all="ignore"):
        quantise(codec, values, out[:head].view(np.float32), out[head:].view(QUANTISERS[codec].codes))
    return out.data


def put_body(codec: Codec, body: Buffer, target: F32) -> None:
    """Bring a push's chunk to its place; a lossy one is added to the base that lies there."""
    raw = np.frombuffer(body, np.uint8)
    if not codec.lossy:
        np.copyto(target.view(np.uint8), raw)
        return
    steps, codes = _split_body(codec, raw, target.size)
    with np.errstate(all="ignore"):
        add_codes(codec, codes.view(QUANTISERS[codec].codes), steps, target)


def decode_body(codec: Codec, body: Buffer, length: int) -> F32:
    """The `length` elements that a push's chunk stands for."""
    out = np.zeros(length, np.float32)
    put_body(codec, body, out)
    return out


def check_steps(codec: Codec, body: Buffer, length: int) -> None:
    """Raise BadFrame if a step or a code of a push's chunk of `length` elements could bring what is not finite."""
    if not codec.block:
        return
    steps, codes = _split_body(codec, np.frombuffer(body, np.uint8), length)
    wrong = ~((steps >= 0) & (steps <= _LARGEST / (codec.largest + 1)))  # NaN compares false; −128 and −8 can be sent
    if wrong.any():
        first = int(wrong.argmax())
        raise BadFrame("step", f"expected finite steps from 0 on, got {steps[first]} for block {first} of a chunk")
    nan = QUANTISERS[codec].nan_code
    if nan is not None and (coded := (codes & nan) == nan).any():
        first = int(coded.argmax())
        raise BadFrame("step", f"expected numbers, got the code of a NaN for element {first} of a chunk")


def put_pulled(chunk: Range, body: Buffer, target: F32) -> None:
    """Bring a pull's chunk to its place; its updates are added, one by one, to the older version that lies there."""
    if not chunk.depth:
        put_body(chunk.dtype.codec, body, target)
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
