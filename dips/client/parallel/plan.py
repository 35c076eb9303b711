"""Who speaks for what: made from what every rank holds, the same on all ranks, without another word between them.

The full parameters are cut into *pieces*, contiguous ranges that one rank each moves to and from the slaves:

* a run of elements that one rank holds is its piece: nothing travels inside the cluster;
* what several ranks hold alike is cut among them, so that it travels once per cluster and every link carries a share;
* what no rank holds as one run (shards along an inner dim) is cut among the ranks that hold it together: before a push
  they hand each other what the pieces need, after a pull what the shards need, one layer at a time.

If the job has more ranks than may speak, the others hand their ranges to a speaker on their host in the same way.

What must stay true: over all ranks the pieces cover every parameter exactly once, and both ends of a hand-over list
its rectangles in the same order. Pure: no torch, no clock, no socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dips.client.parallel.rect import Rect
from dips.errors import ConfigError
from dips.protocol.manifest import Manifest
from dips.wire.chunks import Range

SPREAD_ITEMS = 1 << 20  # elements of a replicated range that one rank moves rather than cutting it: 4 MiB, few chunks
CUT_ITEMS = 1024  # pieces of a range are cut at multiples of it
SHOWN = 5  # differences in one message


@dataclass(frozen=True, slots=True)
class ParameterClaim:
    """One parameter as one rank says that it holds it."""

    name: str
    shape: tuple[int, ...]
    reads: tuple[Rect, ...]
    writes: tuple[Rect, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """All that one rank says of itself."""

    claims: tuple[ParameterClaim, ...]
    host: str
    staged: bool = False  # it may hold other parameters than its neighbours


@dataclass(frozen=True, slots=True)
class End:
    """A rectangle at this rank's end of a hand-over: in one of its own blocks, or in one of its pieces."""

    param: int  # index in the layer
    index: int  # of the block among the parameter's reads or writes, or of the piece among the plan's
    rect: Rect


@dataclass(slots=True)
class Hands:
    """What this rank hands over in one layer: to and from each peer, in an order that both ends know."""

    gives: dict[int, list[End]] = field(default_factory=dict)
    takes: dict[int, list[End]] = field(default_factory=dict)
    keeps: list[tuple[End, End]] = field(default_factory=list)  # from, to: both on this rank


@dataclass(frozen=True)
class TransferPlan:
    """This rank's part."""

    manifest: Manifest
    pieces: tuple[Range, ...]  # what it moves to and from the slaves
    gather: tuple[Hands, ...]  # by layer, before a push: from blocks that are read to pieces
    spread: tuple[Hands, ...]  # by layer, after a pull: from pieces to blocks that are written


def make_plan(
    ranks: Sequence[RankLayout], me: int, most_speakers: int = 256, spread_items: int = SPREAD_ITEMS
) -> TransferPlan:
    """Plan for rank `me` of the job.

    Errors  ConfigError, the same on every rank: ranks disagree on a parameter, an element is held by nobody or twice
    Cost    every rank reads what all ranks hold: some microseconds for each parameter of each rank
    """
    _agree(ranks)
    held = {claim.name: claim.shape for rank in ranks for claim in rank.claims}
    if not held:
        raise ConfigError("the model has no parameter with requires_grad: nothing would be trained")
    manifest = Manifest.from_shapes(held.items())
    return _Planner(ranks, me, manifest, most_speakers, spread_items).plan()


def _agree(ranks: Sequence[RankLayout]) -> None:
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


@dataclass(slots=True)
class _Slab:
    """A contiguous range of a parameter, and who holds which rectangles of it; overlaps no other slab."""

    begin: int
    end: int
    rects: list[Rect]


class _Planner:
    def __init__(
        self, ranks: Sequence[RankLayout], me: int, manifest: Manifest, most_speakers: int, spread_items: int
    ) -> None:
        self._ranks, self._me, self._manifest, self._spread_items = ranks, me, manifest, spread_items
        self._speakers = _speakers([rank.host for rank in ranks], most_speakers)
        self._load = [0] * len(ranks)
        self._pieces: list[Range] = []
        self._gather = [Hands() for _ in manifest.layers]
        self._spread = [Hands() for _ in manifest.layers]
        self._reads: dict[str, dict[Rect, list[tuple[int, int]]]] = {}  # rectangle → (rank, block) that hold it
        self._writes: dict[str, list[tuple[int, int, Rect]]] = {}
        self._mine: dict[str, list[tuple[int, int, Rect]]] = {}
        for number, rank in enumerate(ranks):
            for claim in rank.claims:
                reads = self._reads.setdefault(claim.name, {})
                for block, rect in enumerate(claim.reads):
                    reads.setdefault(rect, []).append((number, block))
                writes = [(number, block, rect) for block, rect in enumerate(claim.writes)]
                self._writes.setdefault(claim.name, []).extend(writes)
                if number == me:
                    self._mine.setdefault(claim.name, []).extend(writes)

    def plan(self) -> TransferPlan:
        for l, layer in enumerate(self._manifest.layers):
            for k, parameter in enumerate(layer.parameters):
                reads = self._reads[parameter.name]
                for slab in _slabs(parameter.name, sorted(reads), parameter.numel):
                    holders = sorted({rank for rect in slab.rects for rank, _ in reads[rect]})
                    for begin, end, speaker in self._cut(slab, holders):
                        self._piece(Range(l, k, begin, end - begin), speaker, slab, parameter.name)
        return TransferPlan(self._manifest, tuple(self._pieces), tuple(self._gather), tuple(self._spread))

    def _cut(self, slab: _Slab, holders: list[int]) -> Iterator[tuple[int, int, int]]:
        """Deal a slab to as few speakers as carry it well, those first that have least."""
        able = self._able(holders)
        length = slab.end - slab.begin
        count = min(len(able), -(-length // self._spread_items))
        chosen = sorted(able, key=lambda rank: (self._load[rank], rank))[:count]
        step = -(-length // count)
        if step > CUT_ITEMS:
            step = -(-step // CUT_ITEMS) * CUT_ITEMS
        for speaker, begin in zip(chosen, range(slab.begin, slab.end, step), strict=False):
            end = min(begin + step, slab.end)
            self._load[speaker] += end - begin
            yield begin, end, speaker

    def _able(self, holders: list[int]) -> list[int]:
        """Who may speak for what these hold: they themselves, else speakers on their hosts."""
        able = [rank for rank in holders if rank in self._speakers]
        if able:
            return able
        hosts = {self._ranks[rank].host for rank in holders}
        return [rank for rank in self._speakers if self._ranks[rank].host in hosts] or list(self._speakers)

    def _piece(self, piece: Range, speaker: int, slab: _Slab, name: str) -> None:
        me, number = self._me, len(self._pieces)
        begin, end = piece.offset, piece.offset + piece.length
        gather, spread = self._gather[piece.layer], self._spread[piece.layer]
        for rect in slab.rects:
            parts = rect.within(begin, end)
            giver, block = self._giver(self._reads[name][rect], speaker)
            if me in (giver, speaker):
                for part in parts:
                    _hand(gather, me, giver, End(piece.param, block, part), speaker, End(piece.param, number, part))
        for taker, block, rect in self._writes[name] if me == speaker else self._mine.get(name, ()):
            for part in rect.within(begin, end):
                _hand(spread, me, speaker, End(piece.param, number, part), taker, End(piece.param, block, part))
        if me == speaker:
            self._pieces.append(piece)

    def _giver(self, holders: list[tuple[int, int]], speaker: int) -> tuple[int, int]:
        """Whose copy a speaker takes: its own, one on its host, any."""
        host = self._ranks[speaker].host
        return min(holders, key=lambda h: (h[0] != speaker, self._ranks[h[0]].host != host, h[0]))


def _hand(hands: Hands, me: int, giver: int, here: End, taker: int, there: End) -> None:
    if giver == taker == me:
        hands.keeps.append((here, there))
    elif giver == me:
        hands.gives.setdefault(taker, []).append(here)
    elif taker == me:
        hands.takes.setdefault(giver, []).append(there)


def _speakers(hosts: Sequence[str], most: int) -> dict[int, None]:
    """At most `most` ranks, evenly from each host, in the ranks' order; all of them if they are no more."""
    if len(hosts) <= most:
        return dict.fromkeys(range(len(hosts)))
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    rounds = max(len(ranks) for ranks in by_host.values())
    turns = (ranks[i] for i in range(rounds) for ranks in by_host.values() if i < len(ranks))
    return dict.fromkeys(sorted(rank for rank, _ in zip(turns, range(most), strict=False)))


def _slabs(name: str, found: Iterable[Rect], numel: int) -> Iterator[_Slab]:
    """Group rectangles, sorted, whose ranges overlap; check that together they are the parameter, exactly once."""
    at, slab = 0, None
    for rect in found:
        if slab is not None and rect.first < slab.end:
            slab.rects.append(rect)
            slab.end = max(slab.end, rect.end)
            continue
        if slab is not None:
            yield _whole(name, slab)
            at = slab.end
        if rect.first != at:
            raise ConfigError(f"{name}: elements {at} to {rect.first} are held by no rank")
        slab = _Slab(rect.first, rect.end, [rect])
    if slab is not None:
        yield _whole(name, slab)
        at = slab.end
    if at != numel:
        raise ConfigError(f"{name}: elements {at} to {numel} are held by no rank")


def _whole(name: str, slab: _Slab) -> _Slab:
    if len({rect.width for rect in slab.rects if not rect.is_run}) > 1:
        raise ConfigError(f"{name}: ranks hold it cut along different dims")
    for i, rect in enumerate(slab.rects):
        if any(rect.meets(other) for other in slab.rects[:i]):
            raise ConfigError(f"{name}: ranks hold shards that overlap without being equal")
    if sum(rect.numel for rect in slab.rects) != slab.end - slab.begin:
        raise ConfigError(f"{name}: not all of its elements {slab.begin} to {slab.end} are held by a rank")
    return slab
