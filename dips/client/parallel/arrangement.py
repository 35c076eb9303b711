"""An arrangement: one way in which all ranks of a job hold a parameter, its cuts into pieces, and the exchanges for
each.

A model has many parameters and few arrangements, so each is analysed once. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from dips.client.parallel.rank_layout import Holding
from dips.client.parallel.rect import Rect
from dips.client.parallel.slabs import Slab, cut_slabs

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
    if len(hosts) <= most:
        return dict.fromkeys(range(len(hosts)))
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
        if step > CUT_ITEMS:
            step = -(-step // CUT_ITEMS) * CUT_ITEMS
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
