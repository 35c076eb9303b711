"""Ranges of parameters: how a rank says what it holds, how it is cut into chunks, whether all of it is there.

A layer is a list of parameters; a range is a piece of one parameter's flattened elements, so a rank sends what it
holds and nobody gathers (docs/protocol.md#transfers).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from dips.protocol.manifest import Manifest
from dips.wire.frame import BLOCK, INT4_BLOCK, ITEM_BYTES, Dtype

MOST_PROBLEMS = 5  # lines of an error that a person reads


class Range(NamedTuple):
    """`length` elements of one parameter from element `offset` on; a chunk is a range of at most chunk_bytes."""

    layer: int  # index in the manifest
    param: int  # index in the layer
    offset: int
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the wire."""
        return self.length * ITEM_BYTES

    @property
    def dtype(self) -> Dtype:
        """How it is spelled on the wire."""
        return Dtype.FP32

    def cut(self, most: int) -> Self:
        """Its beginning of `most` elements, which are whole blocks; itself if it is not longer."""
        return self if self.length <= most else type(self)(*self[:3], most)


class Bf16Range(Range):
    """A range that travels as bf16 differences."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return self.length * 2

    @property
    def dtype(self) -> Dtype:
        return Dtype.BF16


class Int8Range(Range):
    """A range that travels as int8 differences, a step for each block."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return self.length + ITEM_BYTES * -(-self.length // BLOCK)

    @property
    def dtype(self) -> Dtype:
        return Dtype.INT8


class Int4Range(Range):
    """A range that travels as int4 differences, two in a byte, a step for each block."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return -(-self.length // 2) + ITEM_BYTES * -(-self.length // INT4_BLOCK)

    @property
    def dtype(self) -> Dtype:
        return Dtype.INT4


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
                block += -(-parameter.numel // BLOCK)

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
        return slice(first + piece.offset // BLOCK, first - (-(piece.offset + piece.length) // BLOCK))


def split_chunks(pieces: Iterable[Range], chunk_bytes: int) -> Iterator[Range]:
    """Cut ranges into chunks, in order: as many elements as `chunk_bytes` of fp32 hold, however they are spelled."""
    most = chunk_bytes // ITEM_BYTES
    for piece in pieces:
        layer, param, offset, length = piece
        for begin in range(0, length, most):
            yield type(piece)(layer, param, offset + begin, min(most, length - begin))


def describe_uncovered(layout: LayerLayout, claims: Mapping[str, Sequence[Range]]) -> list[str]:
    """Say where claims (who → its ranges, inside the layout) overlap or leave gaps; [] if each element has one owner.

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
