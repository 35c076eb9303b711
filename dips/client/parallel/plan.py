"""The transfer plan: which rank moves which pieces, computed from all layouts, identically on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from math import prod
from typing import Any, Protocol

import msgspec
import xxhash

from dips.client.parallel.rect import Rect, Slab, cut_slabs
from dips.errors import ConfigError
from dips.protocol.grouping import PLAIN_GROUPING, Grouping, is_shared_buffer
from dips.protocol.manifest import Manifest
from dips.protocol.rank_keys import TRANSFER_RANKS
from dips.wire.frame import Range

# ---- rank layout ----------------------------------------------------------------------------------------------------
# A model has tens of thousands of parameters held in a few ways: all experts of one shape are laid out alike. So a rank
# lists its distinct holdings once, and for each name the number of its holding. Names are sent only if ranks hold
# different parameters, and then once for all ranks with the same list: the bytes that a rank receives grow with the
# model and the number of ranks, not with their product.


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
    """The one method of JobCollectives that this module calls."""

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


# ---- arrangement ----------------------------------------------------------------------------------------------------
# An arrangement: one way in which all ranks of a job hold a parameter, its cuts into pieces, and the exchanges for
# each.
#
# A model has many parameters and few arrangements, so each is analysed once. Pure.


CUT_ITEMS = 1024  # pieces of a range are cut at multiples of this many elements

Copy = tuple[int, int]  # rank and block that hold a rectangle
Replicas = tuple[int, ...]  # ranks that hold one rectangle, in order


class TransferRanks:
    """The ranks that move bytes to and from the slaves, and the hosts of all ranks."""

    def __init__(self, hosts: Sequence[str], most: int) -> None:
        self._hosts, self._chosen = hosts, choose_transfer_ranks(hosts, most)

    def candidates_for(self, holders: Sequence[int]) -> tuple[int, ...]:
        """Return the transfer ranks for data held by `holders`, in order: those among them, else on their hosts, else
        all.
        """
        among = tuple(rank for rank in holders if rank in self._chosen)
        if among:
            return among
        hosts = {self._hosts[rank] for rank in holders}
        nearby = tuple(rank for rank in self._chosen if self._hosts[rank] in hosts)
        return nearby or tuple(self._chosen)

    def nearest_copy(self, copies: Sequence[Copy], mover: int) -> Copy:
        """Return the copy that a transfer rank reads: its own, else one on its host, else any."""
        host = self._hosts[mover]
        return min(copies, key=lambda copy: (copy[0] != mover, self._hosts[copy[0]] != host, copy[0]))


def choose_transfer_ranks(hosts: Sequence[str], most: int) -> dict[int, None]:
    """Choose at most `most` ranks, evenly from each host, in rank order; all ranks if there are no more."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    rounds = max(len(ranks) for ranks in by_host.values())
    turns = (ranks[i] for i in range(rounds) for ranks in by_host.values() if i < len(ranks))
    return dict.fromkeys(sorted(rank for rank, _ in zip(turns, range(most), strict=False)))


@dataclass(frozen=True, slots=True)
class PieceExchange:
    """This rank's exchanges for one piece, as (peer, block in the holder's memory, rectangle)."""

    gather: tuple[tuple[int, int, Rect], ...]  # before a push, from these ranks to the rank that moves the piece
    spread: tuple[tuple[int, int, Rect], ...]  # after a pull, to these ranks


@dataclass(eq=False, slots=True)
class SlabCut:
    """A slab that is cut among ranks; compared by identity."""

    slab: Slab
    candidates: tuple[int, ...]  # ranks that may move it
    count: int  # most pieces that it is cut into
    step: int  # elements of each piece but the last
    concerns_me: bool  # this rank holds some of it, or may move it
    exchanges: dict[tuple[int, int, int], PieceExchange] = field(default_factory=dict)  # by (begin, end, mover)


class Arrangement:
    """The layout of a parameter on all ranks, as seen by rank `me`."""

    def __init__(
        self,
        name: str,
        held: Sequence[tuple[int, Holding]],
        me: int,
        transfer_ranks: TransferRanks,
        spread_items: int,
    ) -> None:
        """Analyse one layout.

        name  the first parameter that has it, for errors
        held  (rank, holding) in rank order; all of one shape
        """
        self._me, self._transfer_ranks, self._spread_items = me, transfer_ranks, spread_items
        self._reads: dict[Rect, list[Copy]] = {}
        for rank, holding in held:
            for block, rect in enumerate(holding.reads):
                self._reads.setdefault(rect, []).append((rank, block))
        self._writes = [(rank, block, rect) for rank, holding in held for block, rect in enumerate(holding.writes)]
        self._own_writes = [write for write in self._writes if write[0] == me]
        by_rect = {rect: tuple(sorted({rank for rank, _ in copies})) for rect, copies in self._reads.items()}
        self.has_replicas = any(len(ranks) > 1 for ranks in by_rect.values())
        self.own_replicas = [
            (block, by_rect[rect])
            for rect in sorted(self._reads)
            for rank, block in self._reads[rect]
            if rank == me and len(by_rect[rect]) > 1
        ]
        """Blocks that this and other ranks read, with those ranks, in an order that is the same on all of them."""
        self.cuts = [self._cut_slab(slab) for slab in cut_slabs(name, sorted(self._reads), prod(held[0][1].shape))]

    def _cut_slab(self, slab: Slab) -> SlabCut:
        """Cut a slab into as few pieces as `spread_items` allows, and choose the transfer ranks for them."""
        holders = sorted({rank for rect in slab.rects for rank, _ in self._reads[rect]})
        candidates = self._transfer_ranks.candidates_for(holders)
        length = slab.end - slab.begin
        count = min(len(candidates), -(-length // self._spread_items))
        step = -(-length // count)
        unit = min(step, CUT_ITEMS)
        step = -(-step // unit) * unit
        mine = self._me in holders or self._me in candidates
        mine = mine or any(rect.cut_between(slab.begin, slab.end) for _, _, rect in self._own_writes)
        return SlabCut(slab, candidates, count, step, mine)

    def find_exchange(self, cut: SlabCut, begin: int, end: int, mover: int) -> PieceExchange:
        """Return this rank's exchanges for the piece [begin, end) that rank `mover` moves."""
        found = cut.exchanges.get((begin, end, mover))
        if found is None:
            found = cut.exchanges[begin, end, mover] = self._list_exchange(cut.slab, begin, end, mover)
        return found

    def _list_exchange(self, slab: Slab, begin: int, end: int, mover: int) -> PieceExchange:
        me, gather = self._me, []
        for rect in slab.rects:
            source, block = self._transfer_ranks.nearest_copy(self._reads[rect], mover)
            if me in (source, mover):
                gather += [(source, block, part) for part in rect.cut_between(begin, end)]
        writes = self._writes if me == mover else self._own_writes
        spread = [(rank, block, part) for rank, block, rect in writes for part in rect.cut_between(begin, end)]
        return PieceExchange(tuple(gather), tuple(spread))


# ---- ways -----------------------------------------------------------------------------------------------------------
# The ways in which the ranks of a job together hold its parameters, and the check that they hold the same model. Pure.
#
# Ranks with the same names, and the same holding for each, are analysed once.


SHOWN = 5  # differences that a message lists

Way = tuple[tuple[int, tuple[int, ...]], ...]  # for each group: (group, number of the holding in each column)


@dataclass(slots=True)
class RankGroup:
    """Ranks that hold the same parameters, by their columns of holdings."""

    names: tuple[str, ...]
    columns: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class ParameterWays:
    """The way in which all ranks hold each parameter, in the order in which the ranks list them."""

    def __init__(self, ranks: Sequence[RankLayout]) -> None:
        """Group the ranks. Raises ConfigError, the same on every rank, if they hold different models."""
        self._ranks = ranks
        groups: dict[tuple[str, ...], RankGroup] = {}
        for number, rank in enumerate(ranks):
            group = groups.setdefault(rank.names, RankGroup(rank.names))
            group.columns.setdefault(rank.column, []).append(number)
        self._groups = list(groups.values())
        self.by_name: dict[str, Way] = {}
        for index, group in enumerate(self._groups):
            for name, numbers in zip(group.names, zip(*group.columns, strict=True), strict=True):
                self.by_name[name] = (*self.by_name.get(name, ()), (index, numbers))
        self.holders = {way: self._list_holders(way) for way in set(self.by_name.values())}
        self._check_agreement()

    def _list_holders(self, way: Way) -> list[tuple[int, Holding]]:
        held = [
            (rank, self._ranks[rank].holdings[number])
            for index, numbers in way
            for number, ranks in zip(numbers, self._groups[index].columns.values(), strict=True)
            for rank in ranks
        ]
        return sorted(held, key=lambda one: one[0])

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return a parameter's full shape, on which all ranks agree."""
        return self.holders[self.by_name[name]][0][1].shape

    def _check_agreement(self) -> None:
        lines = list(self._list_other_shapes())
        count = len(lines)
        if not any(rank.staged for rank in self._ranks):
            missing = [self.by_name.keys() - set(group.names) for group in self._groups]
            absent = sorted(
                (rank, names)
                for group, names in zip(self._groups, map(sorted, missing), strict=True)
                for ranks in group.columns.values()
                for rank in ranks
            )
            count += sum(len(names) for _, names in absent)
            for rank, names in absent:
                held = names[: max(0, SHOWN - len(lines))]
                lines += [f"{name}: on rank {self._first_rank(name)}, not on rank {rank}" for name in held]
        if lines:
            more = [f"and {count - SHOWN} more"] if count > SHOWN else []
            raise ConfigError(f"the ranks hold different models: {'; '.join([*lines[:SHOWN], *more])}")

    def _list_other_shapes(self) -> Iterator[str]:
        """Yield a line for each shape that differs from that of the first rank with the parameter."""
        unlike = {way for way, held in self.holders.items() if len({h.shape for _, h in held}) > 1}
        if not unlike:
            return
        for number, rank in enumerate(self._ranks):
            for name, holding in rank.claims:
                if self.by_name[name] in unlike and holding.shape != self.shape_of(name):
                    first = self._first_rank(name)
                    yield f"{name}: shape {self.shape_of(name)} on rank {first}, {holding.shape} on rank {number}"

    def _first_rank(self, name: str) -> int:
        return self.holders[self.by_name[name]][0][0]


# ---- plan -----------------------------------------------------------------------------------------------------------
# The transfer plan: which rank moves which pieces, computed from all layouts, identically on all ranks.
#
# The full parameters are cut into *pieces*, contiguous ranges that are each moved to and from the slaves by one rank:
#
# * a run of elements that one rank holds is its piece: nothing is sent inside the cluster;
# * a run that several ranks replicate is cut among them, so that it is sent once per cluster and links share the load;
# * a range that no rank holds as one run (shards along an inner dim) is cut among its holders: before a push
#   they exchange elements into pieces, after a pull back into shards, one layer at a time.
#
# If the job has more ranks than may move bytes (`max_transfer_ranks`), the others exchange their ranges with a transfer
# rank on their host in the same way.
#
# A rank analyses each arrangement once, then each parameter, and there only the parts that it holds
# itself or that decide which rank moves them.
#
# Must stay true: over all ranks the pieces cover every parameter exactly once, and both ends of an exchange list its
# rectangles in the same order. Pure: no torch, no clock, no socket.


SPREAD_ITEMS = 1 << 20  # elements up to which a replicated range is moved by one rank: 4 MiB, few chunks


@dataclass(frozen=True, slots=True)
class LocalRect:
    """A rectangle in this rank's memory: in one of its blocks, or in one of its pieces."""

    param: int  # index in the layer
    index: int  # of the block in the parameter's reads or writes, or of the piece in the plan
    rect: Rect


@dataclass(slots=True)
class Redistribution:
    """The parts that this rank sends to and receives from each peer in one layer, in an order known at both ends."""

    sends: dict[int, list[LocalRect]] = field(default_factory=dict)
    receives: dict[int, list[LocalRect]] = field(default_factory=dict)
    local: list[tuple[LocalRect, LocalRect]] = field(default_factory=list)  # source, target: both on this rank

    def add_exchange(self, me: int, source: int, here: LocalRect, target: int, there: LocalRect) -> None:
        """Add a rectangle that goes from `here` on `source` to `there` on `target`; `me` is one of the two ranks."""
        if source == target:
            self.local.append((here, there))
        elif source == me:
            self.sends.setdefault(target, []).append(here)
        else:
            self.receives.setdefault(source, []).append(there)


@dataclass(frozen=True)
class TransferPlan:
    """This rank's part of the transfer plan."""

    manifest: Manifest
    pieces: tuple[Range, ...]  # moved by this rank to and from the slaves
    gather: tuple[Redistribution, ...]  # by layer, before a push: from blocks that are read to pieces
    spread: tuple[Redistribution, ...]  # by layer, after a pull: from pieces to blocks that are written
    replicas: tuple[tuple[int, ...], ...] = ()  # for each rank: ranks on its host that write the same, itself included
    has_replicas: bool = False  # some part of a parameter is read on two ranks
    # This rank's (layer, parameter, block) by the ranks that read the same. Without buffers, whose values may differ
    # between ranks between two forwards.
    replicated: Mapping[Replicas, Sequence[tuple[int, int, int]]] = field(default_factory=dict)


def make_plan(
    ranks: Sequence[RankLayout],
    me: int,
    max_transfer_ranks: int = TRANSFER_RANKS,
    spread_items: int = SPREAD_ITEMS,
    grouping: Grouping = PLAIN_GROUPING,
) -> TransferPlan:
    """Plan for rank `me` of the job.

    Errors  ConfigError, the same on every rank: ranks disagree on a parameter, an element is held by no rank or twice
    Cost    about 20 µs per parameter that this rank holds; other ranks count only by their distinct holdings
    """
    ways = ParameterWays(ranks)
    if not ways.by_name:
        raise ConfigError("the model has no parameter with requires_grad: nothing would be trained")
    manifest = Manifest.from_shapes(((name, ways.shape_of(name)) for name in ways.by_name), grouping)
    transfer_ranks = TransferRanks([rank.host for rank in ranks], max_transfer_ranks)
    found: dict[Way, Arrangement] = {}
    for parameter in (p for layer in manifest.layers for p in layer.parameters):
        if (way := ways.by_name[parameter.name]) not in found:
            found[way] = Arrangement(parameter.name, ways.holders[way], me, transfer_ranks, spread_items)
    by_name = {name: found[way] for name, way in ways.by_name.items()}
    return _Planner(me, len(ranks), manifest, by_name, grouping.share_buffers).make_plan()


class _Planner:
    """Assigns each piece to a transfer rank, in the order of the manifest."""

    def __init__(
        self,
        me: int,
        ranks: int,
        manifest: Manifest,
        arrangements: Mapping[str, Arrangement],
        share_buffers: Collection[str],
    ) -> None:
        self._me, self._manifest, self._arrangements = me, manifest, arrangements
        self._share_buffers = share_buffers
        self._load = [0] * ranks  # elements assigned to each rank; only of slabs that influence this rank's pieces
        self._pieces: list[Range] = []
        self._gather = [Redistribution() for _ in manifest.layers]
        self._spread = [Redistribution() for _ in manifest.layers]
        self._cuts = _find_cuts(arrangements.values())

    def make_plan(self) -> TransferPlan:
        replicated: dict[Replicas, list[tuple[int, int, int]]] = {}
        has_replicas = False
        for l, layer in enumerate(self._manifest.layers):
            for k, parameter in enumerate(layer.parameters):
                arrangement = self._arrangements[parameter.name]
                if arrangement.has_replicas and not is_shared_buffer(parameter.name, self._share_buffers):
                    has_replicas = True
                    for block, ranks in arrangement.own_replicas:
                        replicated.setdefault(ranks, []).append((l, k, block))
                for cut in self._cuts[arrangement]:
                    for begin, end, mover in self._deal_cut(cut):
                        if cut.concerns_me:
                            exchange = arrangement.find_exchange(cut, begin, end, mover)
                            self._add_piece(Range(l, k, begin, end - begin), mover, exchange)
        return TransferPlan(
            self._manifest, tuple(self._pieces), tuple(self._gather), tuple(self._spread),
            has_replicas=has_replicas, replicated=replicated,
        )  # fmt: skip

    def _deal_cut(self, cut: SlabCut) -> Iterator[tuple[int, int, int]]:
        """Assign a slab's pieces to its candidates, those with the least load first."""
        slab, load = cut.slab, self._load
        if len(cut.candidates) == 1:  # the usual case: one rank holds the shard
            load[cut.candidates[0]] += slab.end - slab.begin
            yield slab.begin, slab.end, cut.candidates[0]
            return
        chosen = sorted(cut.candidates, key=lambda rank: (load[rank], rank))[: cut.count]
        for mover, begin in zip(chosen, range(slab.begin, slab.end, cut.step), strict=False):
            end = min(begin + cut.step, slab.end)
            load[mover] += end - begin
            yield begin, end, mover

    def _add_piece(self, piece: Range, mover: int, exchange: PieceExchange) -> None:
        """Assign a piece to rank `mover`, and list this rank's exchanges for it before a push and after a pull."""
        me, param, number = self._me, piece.param, len(self._pieces)
        for source, block, part in exchange.gather:
            held, moved = LocalRect(param, block, part), LocalRect(param, number, part)
            self._gather[piece.layer].add_exchange(me, source, held, mover, moved)
        for target, block, part in exchange.spread:
            moved, held = LocalRect(param, number, part), LocalRect(param, block, part)
            self._spread[piece.layer].add_exchange(me, mover, moved, target, held)
        if me == mover:
            self._pieces.append(piece)


def _find_cuts(arrangements: Iterable[Arrangement]) -> dict[Arrangement, list[SlabCut]]:
    """Return for each arrangement the cuts that this rank must assign: those that concern it, and all that their loads
    depend on.

    The loads of a slab's candidates decide which of them moves it; these depend on other slabs of theirs, and so on.
    """
    distinct = list(dict.fromkeys(arrangements))
    shared = {cut.candidates: cut.concerns_me for one in distinct for cut in one.cuts}
    shared |= {cut.candidates: True for one in distinct for cut in one.cuts if cut.concerns_me}
    counted = {rank for candidates, mine in shared.items() if mine for rank in candidates}
    grown = True
    while grown:
        more = {rank for ranks in shared if not counted.isdisjoint(ranks) for rank in ranks} - counted
        counted, grown = counted | more, bool(more)
    return {
        one: [cut for cut in one.cuts if cut.concerns_me or not counted.isdisjoint(cut.candidates)] for one in distinct
    }
