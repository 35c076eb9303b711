"""A simulated trainer's feed: cuts the leased ranges into inner steps as dips/client/data.py does."""

from __future__ import annotations

from dataclasses import dataclass

from dips.client.ipc.messages import RangeGiven
from dips.data.steps import Part, StepCutter
from dips.protocol.data import BegunRange


@dataclass(frozen=True)
class DataShape:
    """The number of samples in ranges and inner steps."""

    range_samples: int
    step_samples: int


class SimFeed:
    """The remaining samples of the ranges given to one trainer."""

    def __init__(self, shape: DataShape) -> None:
        self._shape, self._cutter, self._recalls = shape, StepCutter(shape.step_samples), 0

    @property
    def left(self) -> tuple[int, ...]:
        """The ranges with samples to train."""
        return self._cutter.numbers_left

    @property
    def begun(self) -> BegunRange | None:
        """The first of them, if a part of it is trained, else None."""
        part = self._cutter.parts[0] if self._cutter.parts else None
        return BegunRange(part.number, part.begin, part.of) if part and part.begin else None

    def add_range(self, given: RangeGiven) -> None:
        """Append the samples of a given range."""
        self.note_recalls(given.recalls)
        self._cutter.add_range(given.range, self._shape.range_samples, given.begun.done if given.begun else 0)

    def note_recalls(self, recalls: int) -> None:
        """Drop the remaining samples if ranges were recalled since the last call."""
        if recalls != self._recalls:
            self._recalls = recalls
            self._cutter.parts.clear()

    def take_step(self, *, whole: bool) -> tuple[Part, ...]:
        """Return the samples of the next inner step; empty if none is left, or, with `whole`, too few."""
        return tuple(self._cutter.take_step(whole=whole))
