"""The ways in which the ranks of a job together hold its parameters, and the check that they hold the same model. Pure.

Ranks with the same names, and the same holding for each, are analysed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dips.client.parallel.rank_layout import Holding, RankLayout
from dips.errors import ConfigError

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
