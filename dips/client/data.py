"""Batches from leased data ranges, for a torch DataLoader with workers and for Hugging Face data sets.

    data = DataSet("corpus")                                              # of `dips data build`
    batches = TokenBatches(data, sequences=8, length=2048, rank=rank, world=world)
    loader = DataLoader(RangeDataset(batches), batch_size=None, num_workers=2, persistent_workers=True)
    feed = Feed(outer, loader)
    for batch in feed:                                                    # i64[8, 2049]
        ...
        outer.step(tokens=feed.samples * 2048, loss=loss)

Every sample is trained once: the samples after a range's last whole step go into the first step of the next range,
and the samples left at the end of the data form a smaller step. A range counts as trained with the step that has its
last sample. A cluster that continues a partly trained range starts where it was left, with any number of ranks.

Only this process asks for ranges. Workers find in shared memory which samples come next, and have read them before
more are asked for. The order of batches does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dips.client.rank.outer_loop import OuterLoop
from dips.data.deal import deal_rows, shuffle_numbers
from dips.data.reader import DataSet
from dips.data.steps import Part, StepCutter, samples_of, share_step
from dips.errors import ConfigError
from dips.protocol.data import BegunRange

MOST_PARTS = 256  # data ranges that one step may take samples of


class Batches(Protocol):
    """The source of one rank's batches: samples grouped into ranges; each inner step takes the same number on every
    rank.
    """

    @property
    def ranges(self) -> int: ...

    @property
    def digest(self) -> str:
        """The digest of the data set; "" if it has none."""

    @property
    def step_samples(self) -> int:
        """The number of samples in a whole step, over all ranks."""

    def samples(self, number: int) -> int:
        """Return the number of samples in a range, over all ranks."""

    def read_step(self, step: Sequence[Part]) -> Any:
        """Return this rank's batch of a step."""


class TokenBatches:
    """Sequences of tokens of a data set: i64[sequences, length + 1] each."""

    def __init__(self, data: DataSet, sequences: int, length: int, rank: int = 0, world: int = 1) -> None:
        """Read batches for one rank.

        sequences    this rank's sequences in one inner step
        rank, world  this reader's number and the count of readers that have batches of their own
        """
        self._data, self._shape, self._place = data, (sequences, length), (rank, world)

    @property
    def ranges(self) -> int:
        return self._data.ranges

    @property
    def digest(self) -> str:
        return self._data.digest

    @property
    def step_samples(self) -> int:
        return self._shape[0] * self._place[1]

    def samples(self, number: int) -> int:
        return self._data.sequences(number, self._shape[1])

    def read_step(self, step: Sequence[Part]) -> torch.Tensor:
        length = self._shape[1]
        shares = share_step(step, *self._place)
        tokens = np.concatenate([self._data.read_sequences(number, length, places) for number, places in shares])
        return torch.from_numpy(tokens.astype(np.int64))


class RowBatches:
    """Rows of an indexable table, such as a Hugging Face `Dataset`, without copying it.

    Yields `table[numbers]` with `size` numbers each; a Hugging Face data set returns columns for it.
    """

    def __init__(
        self,
        table: Any,
        ranges: int,
        size: int,
        seed: int = 0,
        sources: Sequence[object] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Deal the rows of a table into ranges.

        sources  the source of each row, so that each range has its share of every source; None: all rows have one
        """
        self._table, self._size, self._seed, self._place = table, size, seed, (rank, world)
        self._rows = deal_rows(len(table), ranges, seed, sources)
        self._last: tuple[int, list[int]] | None = None  # range, its row numbers
        self.digest = ""

    @property
    def ranges(self) -> int:
        return len(self._rows)

    @property
    def step_samples(self) -> int:
        return self._size * self._place[1]

    def samples(self, number: int) -> int:
        return len(self._rows[number % self.ranges])

    def rows(self, number: int) -> list[int]:
        """Return the row numbers of a range, for `table.select`."""
        if self._last is None or self._last[0] != number:
            dealt = self._rows[number % self.ranges]
            self._last = (number, [int(row) for row in dealt[shuffle_numbers(len(dealt), self._seed, number)]])
        return self._last[1]

    def read_step(self, step: Sequence[Part]) -> Any:
        shares = share_step(step, *self._place)
        return self._table[[self.rows(number)[place] for number, places in shares for place in places]]


class RangeDataset(IterableDataset[Any]):
    """An iterable data set of the batches that come next, for a DataLoader with `batch_size=None`, with or without
    workers.
    """

    def __init__(self, batches: Batches) -> None:
        self.source = batches
        # On the host, shared with the workers: whether only whole steps are wanted, how many parts, then each part.
        self._next = torch.zeros(2 + MOST_PARTS * 4, dtype=torch.int64, device="cpu").share_memory_()

    def set_parts(self, parts: Sequence[Part], *, whole: bool = True) -> None:
        """Make the next iterator yield the whole steps of these samples; if not `whole`, also a last, smaller step."""
        if len(parts) > MOST_PARTS:
            raise ConfigError(
                f"a step takes samples of more than {MOST_PARTS} data ranges: build a data set of fewer ranges"
            )
        numbers = [int(whole), len(parts), *(number for part in parts for number in astuple(part))]
        self._next[: len(numbers)] = torch.tensor(numbers, device="cpu")

    def __iter__(self) -> Iterator[Any]:
        whole, count, *numbers = self._next.tolist()
        parts = [Part(*numbers[4 * i : 4 * i + 4]) for i in range(count)]
        cutter, at = StepCutter(self.source.step_samples, parts), 0
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        while step := cutter.take_step(whole=bool(whole)):
            if at % workers == mine:  # the loader takes one batch from each worker in turn, which keeps the order
                yield self.source.read_step(step)
            at += 1


class Feed:
    """All batches of the ranges leased to this cluster, until the data or the run ends.

    Report each step before taking the next batch, and do not prefetch batches: the samples of a range behind the batch
    taken last count as still to be trained.
    """

    def __init__(self, outer: OuterLoop, loader: DataLoader[Any]) -> None:
        """Raise ConfigError if the loader's data set is not the one that the run agreed on."""
        if not isinstance(loader.dataset, RangeDataset) or loader.batch_size is not None:
            raise ConfigError("expected DataLoader(RangeDataset(…), batch_size=None, …): its batches are whole already")
        if not getattr(loader, "in_order", True):  # torch has it since 2.6
            raise ConfigError(
                "expected DataLoader(in_order=True): a range is trained in its order, or not known how far"
            )
        agreed, source = outer.shared.data, loader.dataset.source
        if agreed.ranges != source.ranges:
            raise ConfigError(f"shared.data.ranges: expected {source.ranges}, as the data set has, got {agreed.ranges}")
        if agreed.digest and source.digest and agreed.digest != source.digest:
            raise ConfigError(f"shared.data.digest: expected {source.digest}, this data set's, got {agreed.digest}")
        if not any(source.samples(number) for number in range(source.ranges)):  # all would be used up without a step
            raise ConfigError(
                "each data range is shorter than one sequence: take shorter ones, or build a data set of fewer ranges"
            )
        self._outer, self._loader, self._dataset, self._source = outer, loader, loader.dataset, source
        self._cutter, self._recalls, self._told = StepCutter(source.step_samples), outer.range_recalls, set[str]()
        self.number, self.cursor = -1, 0  # range in which the last batch ends, its trained samples
        self.samples = 0  # samples in the last batch, over all ranks; fewer in the last step of the data

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, for a checkpoint. Unlike `outer.state_dict`, it also tells how ranges are
        cut.
        """
        return {"number": self.number, "cursor": self.cursor, "of": self._of(self.number)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Check that a checkpoint's ranges are cut as these are; `outer.load_state_dict` restores the position.

        The number of ranks may differ. Raises ConfigError if the range has another number of samples.
        """
        of = self._of(state["number"])
        if of != state["of"]:
            raise ConfigError(
                f"data range {state['number']}: expected {state['of']} samples, as in the checkpoint, it has {of}: "
                "take the checkpoint's sequence length and data set"
            )

    def __iter__(self) -> Iterator[Any]:
        outer = self._outer
        # before the first range is asked for, so that recalls are noticed
        outer.mark_ranges(self._cutter.numbers_left, self._begun())
        if not outer.finished and not self._forget_recalled():
            yield from self._take_steps(whole=True)  # what a loop over this feed that was left has not taken
        while True:
            for number in outer.ranges():
                self._add_range(number)
                yield from self._take_steps(whole=True)
                if outer.finished:
                    return
            if outer.finished or not self._cutter.parts:
                return
            yield from self._take_steps(whole=False)

    def _add_range(self, number: int) -> None:
        self._forget_recalled()
        begun, of = self._outer.range_begun, self._of(number)
        begin = begun.done if begun is not None and begun.of == of else 0
        if begun is not None and begun.of != of:
            self._tell_once(
                "cut",
                f"data range {number} has {of} samples here and {begun.of} where {begun.done} of them were trained: it "
                "is trained from its beginning; give all clusters one sequence length",
            )
        if of < self._source.step_samples:
            self._tell_once(
                "small",
                f"data range {number} has {of} samples, fewer than a step, which takes {self._source.step_samples}: "
                "nothing is lost, but a crash costs several ranges; build a data set of fewer ranges",
            )
        self._cutter.add_range(number, of, begin)
        self._outer.mark_ranges(self._cutter.numbers_left, self._begun())

    def _take_steps(self, whole: bool) -> Iterator[Any]:
        self._dataset.set_parts(self._cutter.parts, whole=whole)
        if self._cutter.left < self._source.step_samples and whole:
            return  # no batch: workers are not asked
        for batch in self._loader:
            step = self._cutter.take_step(whole=whole)
            self.number, self.cursor, self.samples = step[-1].number, step[-1].end, samples_of(step)
            self._outer.mark_ranges(self._cutter.numbers_left, self._begun())
            yield batch
            if self._outer.finished or self._forget_recalled():
                return

    def _begun(self) -> BegunRange | None:
        """Return the range that comes next if a part of it is trained, else None."""
        part = self._cutter.parts[0] if self._cutter.parts else None
        return BegunRange(part.number, part.begin, part.of) if part and part.begin else None

    def _forget_recalled(self) -> bool:
        """Drop the samples that are left if the trainer's ranges were recalled; the master leases them again."""
        recalled = self._recalls != self._outer.range_recalls
        if recalled:
            self._recalls = self._outer.range_recalls
            self._cutter.parts.clear()
            self._outer.mark_ranges(())
        return recalled

    def _of(self, number: int) -> int:
        return self._source.samples(number) if number >= 0 else 0

    def _tell_once(self, subject: str, what: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            self._outer.remark(what)
