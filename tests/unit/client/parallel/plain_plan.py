"""The plan as it was before it looked at arrangements: every rank reads every parameter of every rank, one by one.

Slow and plain: what dips/client/parallel/plan.py must agree with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dips.client.parallel.plan import (
    CUT_ITEMS,
    SHOWN,
    SPREAD_ITEMS,
    Holding,
    LocalRect,
    RankLayout,
    Redistribution,
    TransferPlan,
    choose_transfer_ranks,
)
from dips.client.parallel.rect import Rect, Slab, cut_slabs
from dips.errors import ConfigError
from dips.protocol.manifest import Manifest
from dips.wire.frame import Range


def make_plain_plan(
    ranks: Sequence[RankLayout], me: int, max_transfer_ranks: int = 256, spread_items: int = SPREAD_ITEMS
) -> TransferPlan:
    """Plan for rank `me` of the job.

    Errors  ConfigError, the same on every rank
    """
    _check_agreement(ranks)
    held = {name: holding.shape for rank in ranks for name, holding in rank.claims}
    if not held:
        raise ConfigError("the model has no parameter with requires_grad: nothing would be trained")
    manifest = Manifest.from_shapes(held.items())
    return PlainPlanner(ranks, me, manifest, max_transfer_ranks, spread_items).make_plan()


def _check_agreement(ranks: Sequence[RankLayout]) -> None:
    lines: list[str] = []
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    for number, rank in enumerate(ranks):
        for name, holding in rank.claims:
            shape, first = shapes.setdefault(name, (holding.shape, number))
            if shape != holding.shape:
                lines.append(f"{name}: shape {shape} on rank {first}, {holding.shape} on rank {number}")
    if not any(rank.staged for rank in ranks):
        for number, rank in enumerate(ranks):
            missing = shapes.keys() - set(rank.names)
            lines += [f"{name}: on rank {shapes[name][1]}, not on rank {number}" for name in sorted(missing)]
    if lines:
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise ConfigError(f"the ranks hold different models: {'; '.join([*lines[:SHOWN], *more])}")


class PlainPlanner:
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
            for name, holding in rank.claims:
                self._add_claim(number, name, holding)

    def _add_claim(self, rank: int, name: str, claim: Holding) -> None:
        reads = self._reads.setdefault(name, {})
        for block, rect in enumerate(claim.reads):
            reads.setdefault(rect, []).append((rank, block))
        writes = [(rank, block, rect) for block, rect in enumerate(claim.writes)]
        self._writes.setdefault(name, []).extend(writes)
        if rank == self._me:
            self._own_writes.setdefault(name, []).extend(writes)

    def make_plan(self) -> TransferPlan:
        for l, layer in enumerate(self._manifest.layers):
            for k, parameter in enumerate(layer.parameters):
                reads = self._reads[parameter.name]
                for slab in cut_slabs(parameter.name, sorted(reads), parameter.numel):
                    holders = sorted({rank for rect in slab.rects for rank, _ in reads[rect]})
                    for begin, end, mover in self._deal_slab(slab, holders):
                        self._add_piece(Range(l, k, begin, end - begin), mover, slab, parameter.name)
        places = {
            p.name: (l, k) for l, layer in enumerate(self._manifest.layers) for k, p in enumerate(layer.parameters)
        }
        replicated: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        shared = [
            (places[name], rect, sorted({rank for rank, _ in held}), held)
            for name, reads in self._reads.items()
            for rect, held in reads.items()
            if len({rank for rank, _ in held}) > 1
        ]
        for place, _, ranks, held in sorted(shared, key=lambda one: one[:2]):
            for block in [block for rank, block in held if rank == self._me]:
                replicated.setdefault(tuple(ranks), []).append((*place, block))
        return TransferPlan(
            self._manifest, tuple(self._pieces), tuple(self._gather), tuple(self._spread),
            has_replicas=bool(shared), replicated=replicated,
        )  # fmt: skip

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
