"""Ranks of one host that write the same parts of the model: DDP's, Megatron's data-parallel ones, HSDP's replicas.

They need one copy of the shard in host memory together: each pulls its pieces into it, and all install from it. What
arrives from ranks of other groups is received by the first of them only. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dips.client.parallel.plan import Redistribution
from dips.client.parallel.rank_layout import Holding, RankLayout

Group = tuple[int, ...]  # ranks, in order
Place = tuple[int, int]  # layer, parameter


def find_replicas(ranks: Sequence[RankLayout]) -> tuple[Group, ...]:
    """The group of each rank, often of itself alone; the same on all ranks."""
    ways: dict[object, int] = {}
    columns: dict[object, tuple[int, ...]] = {}
    found: dict[object, list[int]] = {}
    keys = []
    for rank, layout in enumerate(ranks):
        numbers = tuple(ways.setdefault(_written(holding), len(ways)) for holding in layout.holdings)
        column = columns.setdefault((layout.column, numbers), tuple(numbers[way] for way in layout.column))
        keys.append((layout.host, layout.names, column))
        found.setdefault(keys[-1], []).append(rank)
    return tuple(tuple(found[key]) for key in keys)


@dataclass(frozen=True)
class SharedShards:
    """Which ranks share which parts of their shards; the same on all ranks."""

    group_of: Mapping[int, Group] = field(default_factory=dict)  # of ranks that share
    private: Mapping[Group, Collection[Place]] = field(default_factory=dict)  # parameters that each has for itself

    def shares(self, rank: int, place: Place) -> bool:
        """Whether a rank's memory of this parameter is that of its group."""
        group = self.group_of.get(rank)
        return group is not None and place not in self.private[group]

    def is_sent(self, mover: int, target: int, place: Place) -> bool:
        """Whether what `mover` has pulled for `target` travels: not if it lies there, nor twice to one memory."""
        if not self.shares(target, place):
            return True
        group = self.group_of[target]
        return mover not in group and target == group[0]

    def is_complete(self, me: int, layer: int, moves: Redistribution) -> bool:
        """Whether all that this rank needs of a layer lies in its memory once all ranks have pulled."""
        return all(
            self.shares(me, (layer, rect.param)) and peer in self.group_of[me]
            for peer, rects in moves.receives.items()
            for rect in rects
        )

    def filter_spread(self, me: int, layer: int, moves: Redistribution) -> Redistribution:
        """What of a layer's exchange after a pull is left to do."""
        sends = {
            peer: [rect for rect in rects if self.is_sent(me, peer, (layer, rect.param))]
            for peer, rects in moves.sends.items()
        }
        receives = {
            peer: [rect for rect in rects if self.is_sent(peer, me, (layer, rect.param))]
            for peer, rects in moves.receives.items()
        }
        return Redistribution(
            {peer: rects for peer, rects in sends.items() if rects},
            {peer: rects for peer, rects in receives.items() if rects},
            moves.local,
        )


def _written(holding: Holding) -> object:
    return holding.shape, holding.writes
