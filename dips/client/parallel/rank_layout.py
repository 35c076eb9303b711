"""What one rank tells the others about its part of the model, and how all come to know it from all.

A model has tens of thousands of parameters and holds them in a few ways: all experts of one shape lie alike. So a rank
lists its ways once, and for each name the number of its way. Names travel only where ranks hold other parameters than
their neighbours, and then once for all ranks that hold the same: what a rank receives grows with the model and the
number of ranks, not with their product.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import msgpack
import xxhash

from dips.client.parallel.rect import Rect

FAST = 1  # zlib's level: columns and names repeat themselves


@dataclass(frozen=True, slots=True)
class Holding:
    """How one rank holds a parameter, whatever its name."""

    shape: tuple[int, ...]
    reads: tuple[Rect, ...]
    writes: tuple[Rect, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Everything that one rank tells the others about its part of the model."""

    names: tuple[str, ...]
    holdings: tuple[Holding, ...]  # the ways in which it holds parameters
    column: tuple[int, ...]  # for each name: which of them
    host: str
    staged: bool = False  # it may hold other parameters than its neighbours

    @classmethod
    def from_claims(cls, claims: Iterable[tuple[str, Holding]], host: str, staged: bool = False) -> RankLayout:
        """From each parameter's name and how it is held."""
        numbers: dict[Holding, int] = {}
        names, column = [], []
        for name, holding in claims:
            names.append(name)
            column.append(numbers.setdefault(holding, len(numbers)))
        return cls(tuple(names), tuple(numbers), tuple(column), host, staged)

    @property
    def claims(self) -> Iterator[tuple[str, Holding]]:
        """Each parameter's name, and how it is held."""
        return zip(self.names, map(self.holdings.__getitem__, self.column), strict=True)


class GatherMessages(Protocol):
    """The collective that is needed here; JobCollectives has it."""

    rank: int

    def all_gather(self, message: bytes) -> list[bytes]: ...


def gather_layouts(own: RankLayout, problem: str, collectives: GatherMessages) -> tuple[list[RankLayout], list[str]]:
    """Tell all ranks this one's layout; return every rank's, and every rank's problem ("": none).

    With a problem anywhere the layouts are of no use.
    """
    names = msgpack.packb(own.names)
    digest = xxhash.xxh3_128_digest(names)
    told = [_unpack(m) for m in collectives.all_gather(_pack(_describe_layout(own, problem, digest)))]
    problems = [str(one["problem"]) for one in told]
    if any(problems):
        return [], problems
    lists = {digest: own.names}
    first = {one["names"]: rank for rank, one in reversed(list(enumerate(told)))}  # who tells the others each list
    if len(first) > 1:
        spoken = collectives.all_gather(_pack(own.names) if first[digest] == collectives.rank else b"")
        lists |= {d: tuple(_unpack(spoken[rank])) for d, rank in first.items() if d != digest}
    columns: dict[bytes, tuple[int, ...]] = {}
    return [_read_layout(one, lists, columns) for one in told], problems


def _describe_layout(own: RankLayout, problem: str, digest: bytes) -> dict[str, Any]:
    holdings = [(h.shape, *([astuple(rect) for rect in rects] for rects in (h.reads, h.writes))) for h in own.holdings]
    column = msgpack.packb(own.column)
    return {
        "problem": problem, "host": own.host, "staged": own.staged, "names": digest, "holdings": holdings,
        "column": column,
    }  # fmt: skip


def _read_layout(
    told: Mapping[str, Any], lists: Mapping[bytes, tuple[str, ...]], columns: dict[bytes, tuple[int, ...]]
) -> RankLayout:
    """Equal lists and columns become one object."""
    column = columns.get(told["column"])
    if column is None:
        column = columns[told["column"]] = tuple(msgpack.unpackb(told["column"]))
    holdings = tuple(
        Holding(tuple(shape), tuple(Rect(*r) for r in reads), tuple(Rect(*w) for w in writes))
        for shape, reads, writes in told["holdings"]
    )
    return RankLayout(lists[told["names"]], holdings, column, told["host"], told["staged"])


def _pack(value: Any) -> bytes:
    return zlib.compress(msgpack.packb(value), FAST)


def _unpack(message: bytes) -> Any:
    return msgpack.unpackb(zlib.decompress(message))
