"""Cuts the samples of data ranges, one range after the other, into inner steps: the rest of a range joins the next.

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

from dips.data.deal import I64
from dips.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """Samples `begin` to below `end` of a data range that has `of` samples."""

    number: int
    begin: int
    end: int
    of: int

    @property
    def samples(self) -> int:
        return self.end - self.begin


class StepCutter:
    """The samples that were added and are in no step yet."""

    def __init__(self, samples: int, parts: Iterable[Part] = ()) -> None:
        """`samples` is the size of one inner step, on all ranks together."""
        if samples < 1:
            raise ConfigError(f"samples of a step: expected at least 1, got {samples}")
        self._samples, self.parts = samples, [*parts]

    def add_range(self, number: int, of: int, begin: int = 0) -> None:
        """Append the samples of a range from `begin` on, if there are any."""
        if begin < of:
            self.parts.append(Part(number, begin, of, of))

    @property
    def left(self) -> int:
        """Number of samples that are in no step yet."""
        return sum(part.samples for part in self.parts)

    @property
    def numbers_left(self) -> tuple[int, ...]:
        """The ranges of these samples, in order."""
        return tuple(part.number for part in self.parts)

    def take_step(self, *, whole: bool = True) -> list[Part]:
        """Return the next step; [] if there is none. Without `whole` it may be smaller, of all samples left."""
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
    """Return the number of samples of a step, on all ranks together."""
    return sum(part.samples for part in step)


def share_step(step: Iterable[Part], rank: int, world: int) -> list[tuple[int, I64]]:
    """Return one rank's samples of a step, in order, as (range, places in the range's order); as many on every rank.

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
    """Convert places in the step to (range, places in the range's order)."""
    shares, first = [], 0
    for part in parts:
        inside = places[(places >= first) & (places < first + part.samples)] - first + part.begin
        if len(inside):
            shares.append((part.number, inside))
        first += part.samples
    return shares
