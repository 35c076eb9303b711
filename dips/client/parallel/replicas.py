"""Ranks of one host that write the same parts of the model: replicas of DDP, HSDP and Megatron's data parallelism.

They share one copy of the shard in host memory: each pulls its pieces into it, and all install from it. Parts from
ranks of other groups are received by the group's first rank only. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dips.client.parallel.plan import Redistribution
from dips.client.parallel.rank_layout import Holding, RankLayout

Group = tuple[int, ...]  # ranks in order
Place = tuple[int, int]  # layer, parameter


def find_replicas(ranks: Sequence[RankLayout]) -> tuple[Group, ...]:
    """Return the group of each rank, often only the rank itself; the same on all ranks."""
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
    """The groups of ranks that share parts of their shards; the same on all ranks."""

    group_of: Mapping[int, Group] = field(default_factory=dict)  # only for ranks that share
    private: Mapping[Group, Collection[Place]] = field(default_factory=dict)  # parameters not shared in the group

    def shares(self, rank: int, place: Place) -> bool:
        """Return whether a rank's memory of this parameter is shared in its group."""
        group = self.group_of.get(rank)
        return group is not None and place not in self.private[group]

    def is_sent(self, mover: int, target: int, place: Place) -> bool:
        """Return whether a part that `mover` has pulled is sent to `target`: not within a group, and once per shared
        memory.
        """
        if not self.shares(target, place):
            return True
        group = self.group_of[target]
        return mover not in group and target == group[0]

    def is_complete(self, me: int, layer: int, moves: Redistribution) -> bool:
        """Return whether this rank's whole part of a layer is in its memory once all ranks have pulled."""
        return all(
            self.shares(me, (layer, rect.param)) and peer in self.group_of[me]
            for peer, rects in moves.receives.items()
            for rect in rects
        )

    def filter_spread(self, me: int, layer: int, moves: Redistribution) -> Redistribution:
        """Return the exchanges after a pull that remain with shared memory."""
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
