"""The description of one rank's part of the model, and its exchange among all ranks.

A model has tens of thousands of parameters held in a few ways: all experts of one shape are laid out alike. So a rank
lists its distinct holdings once, and for each name the number of its holding. Names are sent only if ranks hold
different parameters, and then once for all ranks with the same list: the bytes that a rank receives grow with the model
and the number of ranks, not with their product.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import msgspec
import xxhash

from dips.client.parallel.rect import Rect

FAST = 1  # zlib's level: columns and names are repetitive


@dataclass(frozen=True, slots=True)
class Holding:
    """The layout of a parameter on one rank, independent of its name."""

    shape: tuple[int, ...]
    reads: tuple[Rect, ...]
    writes: tuple[Rect, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The description of one rank's part of the model that is sent to all ranks."""

    names: tuple[str, ...]
    holdings: tuple[Holding, ...]  # its distinct holdings
    column: tuple[int, ...]  # for each name its index in `holdings`
    host: str
    staged: bool = False  # it may hold other parameters than other ranks

    @classmethod
    def from_claims(cls, claims: Iterable[tuple[str, Holding]], host: str, staged: bool = False) -> RankLayout:
        """Build a layout from each parameter's name and holding."""
        numbers: dict[Holding, int] = {}
        names, column = [], []
        for name, holding in claims:
            names.append(name)
            column.append(numbers.setdefault(holding, len(numbers)))
        return cls(tuple(names), tuple(numbers), tuple(column), host, staged)

    @property
    def claims(self) -> Iterator[tuple[str, Holding]]:
        """Each parameter's name and holding."""
        return zip(self.names, map(self.holdings.__getitem__, self.column), strict=True)


class GatherMessages(Protocol):
    """The collective that this module needs; JobCollectives has it."""

    rank: int

    def all_gather(self, message: bytes) -> list[bytes]: ...


def gather_layouts(own: RankLayout, problem: str, collectives: GatherMessages) -> tuple[list[RankLayout], list[str]]:
    """Send this rank's layout to all ranks; return every rank's layout and problem ("": none). Collective.

    If any rank reports a problem, the returned layouts are empty.
    """
    names = msgspec.msgpack.encode(own.names)
    digest = xxhash.xxh3_128_digest(names)
    told = [_unpack(m) for m in collectives.all_gather(_pack(_describe_layout(own, problem, digest)))]
    problems = [str(one["problem"]) for one in told]
    if any(problems):
        return [], problems
    lists = {digest: own.names}
    first = {one["names"]: rank for rank, one in reversed(list(enumerate(told)))}  # the rank that sends each list
    if len(first) > 1:
        spoken = collectives.all_gather(_pack(own.names) if first[digest] == collectives.rank else b"")
        lists |= {d: tuple(_unpack(spoken[rank])) for d, rank in first.items() if d != digest}
    columns: dict[bytes, tuple[int, ...]] = {}
    return [_read_layout(one, lists, columns) for one in told], problems


def _describe_layout(own: RankLayout, problem: str, digest: bytes) -> dict[str, Any]:
    holdings = [(h.shape, *([astuple(rect) for rect in rects] for rects in (h.reads, h.writes))) for h in own.holdings]
    column = msgspec.msgpack.encode(own.column)
    return {
        "problem": problem, "host": own.host, "staged": own.staged, "names": digest, "holdings": holdings,
        "column": column,
    }  # fmt: skip


def _read_layout(
    told: Mapping[str, Any], lists: Mapping[bytes, tuple[str, ...]], columns: dict[bytes, tuple[int, ...]]
) -> RankLayout:
    """Decode a layout; equal lists and columns share one object."""
    column = columns.get(told["column"])
    if column is None:
        column = columns[told["column"]] = tuple(msgspec.msgpack.decode(told["column"]))
    holdings = tuple(
        Holding(tuple(shape), tuple(Rect(*r) for r in reads), tuple(Rect(*w) for w in writes))
        for shape, reads, writes in told["holdings"]
    )
    return RankLayout(lists[told["names"]], holdings, column, told["host"], told["staged"])


def _pack(value: Any) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(value), FAST)


def _unpack(message: bytes) -> Any:
    return msgspec.msgpack.decode(zlib.decompress(message))
