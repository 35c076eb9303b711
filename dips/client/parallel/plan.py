"""Which rank moves what: computed from what every rank holds, identically on all ranks, without communication.

The full parameters are cut into *pieces*, contiguous ranges that one rank each moves to and from the slaves:

* a run of elements that one rank holds is its piece: nothing travels inside the cluster;
* what several ranks replicate is cut among them, so that it travels once per cluster and every link carries a share;
* what no rank holds as one run (shards along an inner dim) is cut among the ranks that hold it together: before a push
  they exchange what the pieces need, after a pull what the shards need, one layer at a time.

If the job has more ranks than may move bytes (`max_transfer_ranks`), the others exchange their ranges with a transfer
rank on their host in the same way.

What must stay true: over all ranks the pieces cover every parameter exactly once, and both ends of an exchange list
its rectangles in the same order. Pure: no torch, no clock, no socket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dips.client.parallel.rect import Rect
from dips.client.parallel.slabs import Slab, cut_slabs
from dips.errors import ConfigError
from dips.protocol.manifest import Manifest
from dips.wire.chunks import Range

SPREAD_ITEMS = 1 << 20  # elements of a replicated range that one rank moves rather than cutting it: 4 MiB, few chunks
CUT_ITEMS = 1024  # pieces of a range are cut at multiples of it
SHOWN = 5  # differences in one message


@dataclass(frozen=True, slots=True)
class ParameterClaim:
    """One parameter as one rank holds it."""

    name: str
    shape: tuple[int, ...]
    reads: tuple[Rect, ...]
    writes: tuple[Rect, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Everything that one rank tells the others about its part of the model."""

    claims: tuple[ParameterClaim, ...]
    host: str
    staged: bool = False  # it may hold other parameters than its neighbours


@dataclass(frozen=True, slots=True)
class LocalRect:
    """A rectangle in this rank's memory: in one of its blocks, or in one of its pieces."""

    param: int  # index in the layer
    index: int  # of the block among the parameter's reads or writes, or of the piece among the plan's
    rect: Rect


@dataclass(slots=True)
class Redistribution:
    """What this rank sends to and receives from each peer in one layer, in an order that both ends know."""

    sends: dict[int, list[LocalRect]] = field(default_factory=dict)
    receives: dict[int, list[LocalRect]] = field(default_factory=dict)
    local: list[tuple[LocalRect, LocalRect]] = field(default_factory=list)  # from, to: both on this rank


@dataclass(frozen=True)
class TransferPlan:
    """This rank's part."""

    manifest: Manifest
    pieces: tuple[Range, ...]  # what it moves to and from the slaves
    gather: tuple[Redistribution, ...]  # by layer, before a push: from blocks that are read to pieces
    spread: tuple[Redistribution, ...]  # by layer, after a pull: from pieces to blocks that are written


def make_plan(
    ranks: Sequence[RankLayout], me: int, max_transfer_ranks: int = 256, spread_items: int = SPREAD_ITEMS
) -> TransferPlan:
    """Plan for rank `me` of the job.

    Errors  ConfigError, the same on every rank: ranks disagree on a parameter, an element is held by no rank or twice
    Cost    every rank reads what all ranks hold: some microseconds for each parameter of each rank
    """
    _check_agreement(ranks)
    held = {claim.name: claim.shape for rank in ranks for claim in rank.claims}
    if not held:
        raise ConfigError("the model has no parameter with requires_grad: nothing would be trained")
    manifest = Manifest.from_shapes(held.items())
    return _Planner(ranks, me, manifest, max_transfer_ranks, spread_items).make_plan()


def choose_transfer_ranks(hosts: Sequence[str], most: int) -> dict[int, None]:
    """At most `most` ranks, evenly from each host, in the ranks' order; all of them if they are no more."""
    if len(hosts) <= most:
        return dict.fromkeys(range(len(hosts)))
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    rounds = max(len(ranks) for ranks in by_host.values())
    turns = (ranks[i] for i in range(rounds) for ranks in by_host.values() if i < len(ranks))
    return dict.fromkeys(sorted(rank for rank, _ in zip(turns, range(most), strict=False)))


def _check_agreement(ranks: Sequence[RankLayout]) -> None:
    lines: list[str] = []
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    for number, rank in enumerate(ranks):
        for claim in rank.claims:
            shape, first = shapes.setdefault(claim.name, (claim.shape, number))
            if shape != claim.shape:
                lines.append(f"{claim.name}: shape {shape} on rank {first}, {claim.shape} on rank {number}")
    if not any(rank.staged for rank in ranks):
        for number, rank in enumerate(ranks):
            missing = shapes.keys() - {claim.name for claim in rank.claims}
            lines += [f"{name}: on rank {shapes[name][1]}, not on rank {number}" for name in sorted(missing)]
    if lines:
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise ConfigError(f"the ranks hold different models: {'; '.join([*lines[:SHOWN], *more])}")


class _Planner:
    """Cuts the parameters into pieces and gives each to a transfer rank, in the order of the manifest."""

    def __init__(
        self, ranks: Sequence[RankLayout], me: int, manifest: Manifest, max_transfer_ranks: int, spread_items: int
    ) -> None:
        self._ranks, self._me, self._manifest, self._spread_items = ranks, me, manifest, spread_items
        self._transfer_ranks = choose_transfer_ranks([rank.host for rank in ranks], max_transfer_ranks)
        self._load = [0] * len(ranks)  # elements, by rank
        self._pieces: list[Range] = []
        self._gather = [Redistribution() for _ in manifest.layers]
        self._spread = [Redistribution() for _ in manifest.layers]
        self._reads: dict[str, dict[Rect, list[tuple[int, int]]]] = {}  # rectangle → (rank, block) that hold it
        self._writes: dict[str, list[tuple[int, int, Rect]]] = {}
        self._own_writes: dict[str, list[tuple[int, int, Rect]]] = {}
        for number, rank in enumerate(ranks):
            for claim in rank.claims:
                self._add_claim(number, claim)

    def _add_claim(self, rank: int, claim: ParameterClaim) -> None:
        reads = self._reads.setdefault(claim.name, {})
        for block, rect in enumerate(claim.reads):
            reads.setdefault(rect, []).append((rank, block))
        writes = [(rank, block, rect) for block, rect in enumerate(claim.writes)]
        self._writes.setdefault(claim.name, []).extend(writes)
        if rank == self._me:
            self._own_writes.setdefault(claim.name, []).extend(writes)

    def make_plan(self) -> TransferPlan:
        for l, layer in enumerate(self._manifest.layers):
            for k, parameter in enumerate(layer.parameters):
                reads = self._reads[parameter.name]
                for slab in cut_slabs(parameter.name, sorted(reads), parameter.numel):
                    holders = sorted({rank for rect in slab.rects for rank, _ in reads[rect]})
                    for begin, end, mover in self._deal_slab(slab, holders):
                        self._add_piece(Range(l, k, begin, end - begin), mover, slab, parameter.name)
        return TransferPlan(self._manifest, tuple(self._pieces), tuple(self._gather), tuple(self._spread))

    def _deal_slab(self, slab: Slab, holders: list[int]) -> Iterator[tuple[int, int, int]]:
        """Cut a slab among as few transfer ranks as `spread_items` asks for, those with the least load first."""
        candidates = self._candidate_ranks(holders)
        length = slab.end - slab.begin
        count = min(len(candidates), -(-length // self._spread_items))
        chosen = sorted(candidates, key=lambda rank: (self._load[rank], rank))[:count]
        step = -(-length // count)
        if step > CUT_ITEMS:
            step = -(-step // CUT_ITEMS) * CUT_ITEMS
        for mover, begin in zip(chosen, range(slab.begin, slab.end, step), strict=False):
            end = min(begin + step, slab.end)
            self._load[mover] += end - begin
            yield begin, end, mover

    def _candidate_ranks(self, holders: list[int]) -> list[int]:
        """The transfer ranks for what these ranks hold: among themselves, else on their hosts, else any."""
        among = [rank for rank in holders if rank in self._transfer_ranks]
        if among:
            return among
        hosts = {self._ranks[rank].host for rank in holders}
        nearby = [rank for rank in self._transfer_ranks if self._ranks[rank].host in hosts]
        return nearby or list(self._transfer_ranks)

    def _add_piece(self, piece: Range, mover: int, slab: Slab, name: str) -> None:
        """Give a piece to the rank `mover`, and list what this rank exchanges for it before a push and after a pull."""
        me, number = self._me, len(self._pieces)
        begin, end = piece.offset, piece.offset + piece.length
        gather, spread = self._gather[piece.layer], self._spread[piece.layer]
        for rect in slab.rects:
            parts = rect.cut_between(begin, end)
            source, block = self._nearest_copy(self._reads[name][rect], mover)
            if me in (source, mover):
                for part in parts:
                    held, moved = LocalRect(piece.param, block, part), LocalRect(piece.param, number, part)
                    _add_exchange(gather, me, source, held, mover, moved)
        for target, block, rect in self._writes[name] if me == mover else self._own_writes.get(name, ()):
            for part in rect.cut_between(begin, end):
                moved, held = LocalRect(piece.param, number, part), LocalRect(piece.param, block, part)
                _add_exchange(spread, me, mover, moved, target, held)
        if me == mover:
            self._pieces.append(piece)

    def _nearest_copy(self, holders: list[tuple[int, int]], mover: int) -> tuple[int, int]:
        """The copy that a transfer rank reads: its own, else one on its host, else any."""
        host = self._ranks[mover].host
        return min(holders, key=lambda h: (h[0] != mover, self._ranks[h[0]].host != host, h[0]))


def _add_exchange(moves: Redistribution, me: int, source: int, here: LocalRect, target: int, there: LocalRect) -> None:
    if source == target == me:
        moves.local.append((here, there))
    elif source == me:
        moves.sends.setdefault(target, []).append(here)
    elif target == me:
        moves.receives.setdefault(source, []).append(there)
