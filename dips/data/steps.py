"""Cuts the samples of data ranges, one range after the other, into inner steps: what one range leaves joins the next.

    cutter = StepCutter(32)
    cutter.add_range(7, 62)          # range 7 has 62 samples
    cutter.take_step()               # [Part(7, 0, 32)]; 30 are left, too few for a step
    cutter.add_range(3, 62)
    cutter.take_step()               # [Part(7, 32, 62), Part(3, 0, 2)]

A sample is a sequence of tokens or a row, counted in its range's order; a step has the same samples on any number of
ranks. Pure. Every process of a job cuts alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dips.data.order import I64
from dips.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """Samples `begin` to below `end` of a data range that has `of`."""

    number: int
    begin: int
    end: int
    of: int

    @property
    def samples(self) -> int:
        return self.end - self.begin


class StepCutter:
    """Samples that were given and are in no step yet."""

    def __init__(self, samples: int, parts: Iterable[Part] = ()) -> None:
        """`samples`: of one inner step, on all ranks together."""
        if samples < 1:
            raise ConfigError(f"samples of a step: expected at least 1, got {samples}")
        self._samples, self.parts = samples, [*parts]

    def add_range(self, number: int, of: int, begin: int = 0) -> None:
        """The samples of a range, from `begin` on, come next; none if it has none."""
        if begin < of:
            self.parts.append(Part(number, begin, of, of))

    @property
    def left(self) -> int:
        """Samples that are in no step yet."""
        return sum(part.samples for part in self.parts)

    @property
    def numbers_left(self) -> tuple[int, ...]:
        """The ranges that they are in, in order."""
        return tuple(part.number for part in self.parts)

    def take_step(self, *, whole: bool = True) -> list[Part]:
        """The next step; [] if there is none. Not `whole`: a smaller one, of all samples that are left."""
        left = self.left
        wanted = self._samples if whole else min(self._samples, left)
        if left < wanted:
            return []
        step: list[Part] = []
        while wanted:
            part = self.parts.pop(0)
            taken = min(wanted, part.samples)
            step.append(Part(part.number, part.begin, part.begin + taken, part.of))
            if taken < part.samples:
                self.parts.insert(0, Part(part.number, part.begin + taken, part.end, part.of))
            wanted -= taken
        return step


def samples_of(step: Iterable[Part]) -> int:
    """How many samples a step has, on all ranks together."""
    return sum(part.samples for part in step)


def share_step(step: Iterable[Part], rank: int, world: int) -> list[tuple[int, I64]]:
    """One rank's samples of a step, in order, as (range, places in the range's order); as many on every rank.

    Only the last step of the data may not divide evenly: then some of its first samples go to two ranks, as with
    torch's DistributedSampler, since a rank without a sample has no gradient.
    """
    parts = list(step)
    count = samples_of(parts)
    mine = np.arange(rank, count, world)
    shares = _find_places(parts, mine)
    if len(mine) < -(-count // world):
        shares += _find_places(parts, np.array([(rank + len(mine) * world) % count]))
    return shares


def _find_places(parts: Iterable[Part], places: I64) -> list[tuple[int, I64]]:
    """By range, the places in its order of some places in the step."""
    shares, first = [], 0
    for part in parts:
        inside = places[(places >= first) & (places < first + part.samples)] - first + part.begin
        if len(inside):
            shares.append((part.number, inside))
        first += part.samples
    return shares
