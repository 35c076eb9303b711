"""The transfer plan: which rank moves which pieces, computed from all layouts, identically on all ranks.

The full parameters are cut into *pieces*, contiguous ranges that are each moved to and from the slaves by one rank:

* a run of elements that one rank holds is its piece: nothing is sent inside the cluster;
* a run that several ranks replicate is cut among them, so that it is sent once per cluster and links share the load;
* a range that no rank holds as one run (shards along an inner dim) is cut among its holders: before a push
  they exchange elements into pieces, after a pull back into shards, one layer at a time.

If the job has more ranks than may move bytes (`max_transfer_ranks`), the others exchange their ranges with a transfer
rank on their host in the same way.

A rank analyses each arrangement once (arrangement.py), then each parameter, and there only the parts that it holds
itself or that decide which rank moves them.

Must stay true: over all ranks the pieces cover every parameter exactly once, and both ends of an exchange list
its rectangles in the same order. Pure: no torch, no clock, no socket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dips.client.parallel.arrangement import Arrangement, PieceExchange, Replicas, SlabCut, TransferRanks
from dips.client.parallel.rank_layout import RankLayout
from dips.client.parallel.rect import Rect
from dips.client.parallel.ways import ParameterWays, Way
from dips.errors import ConfigError
from dips.protocol.grouping import PLAIN_GROUPING, Grouping, is_shared_buffer
from dips.protocol.manifest import Manifest
from dips.protocol.rank_keys import TRANSFER_RANKS
from dips.wire.chunks import Range

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
    shared = {cut.candidates: cut.concerns_me for one in distinct for cut in one.cuts if len(cut.candidates) > 1}
    shared |= {c.candidates: True for one in distinct for c in one.cuts if len(c.candidates) > 1 and c.concerns_me}
    counted = {rank for candidates, mine in shared.items() if mine for rank in candidates}
    grown = True
    while grown:
        more = {rank for ranks in shared if not counted.isdisjoint(ranks) for rank in ranks} - counted
        counted, grown = counted | more, bool(more)
    return {
        one: [cut for cut in one.cuts if cut.concerns_me or not counted.isdisjoint(cut.candidates)] for one in distinct
    }
