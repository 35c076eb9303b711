"""From leased data ranges to batches: a torch DataLoader with workers, and Hugging Face data sets.

    data = DataSet("corpus")                                              # of `dips data build`
    batches = TokenBatches(data, sequences=8, length=2048, rank=rank, world=world)
    loader = DataLoader(RangeDataset(batches), batch_size=None, num_workers=2, persistent_workers=True)
    for batch in Feed(outer, loader):                                     # i64[8, 2049]
        ...

Only this process asks for ranges. The workers find in shared memory which range is current, read that one, and are done
with it before the next is asked for; so what counts as trained was trained. The order of batches does not depend on the
number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dips.client.rank.outer_loop import OuterLoop
from dips.data.deal import deal_rows
from dips.data.order import shuffle_numbers
from dips.data.reader import DataSet
from dips.errors import ConfigError


class Batches(Protocol):
    """What one rank trains on in a range, from batch `start` on; as many batches on every rank."""

    @property
    def ranges(self) -> int: ...

    @property
    def digest(self) -> str:
        """Names the data set; "" if nothing does."""

    def batches(self, number: int, start: int) -> Iterator[Any]: ...


class TokenBatches:
    """Sequences of tokens of a data set: i64[sequences, length + 1] each."""

    def __init__(self, data: DataSet, sequences: int, length: int, rank: int = 0, world: int = 1) -> None:
        self._data, self._shape, self._place = data, (sequences, length), (rank, world)

    @property
    def ranges(self) -> int:
        return self._data.ranges

    @property
    def digest(self) -> str:
        return self._data.digest

    def batches(self, number: int, start: int) -> Iterator[torch.Tensor]:
        for tokens in self._data.batches(number, *self._shape, *self._place, start):
            yield torch.from_numpy(tokens.astype(np.int64))


class RowBatches:
    """Rows of a table that is read by numbers, such as a Hugging Face `Dataset`; nothing of it is copied.

    Yields `table[numbers]` with `size` numbers each: what a Hugging Face data set answers with columns.
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
        """`sources`: of each row its source, so that each range has its share of all; None: all rows are of one."""
        self._table, self._size, self._seed, self._place = table, size, seed, (rank, world)
        self._rows = deal_rows(len(table), ranges, seed, sources)
        self.digest = ""

    @property
    def ranges(self) -> int:
        return len(self._rows)

    def rows(self, number: int) -> list[int]:
        """The row numbers of a range, for `table.select`."""
        dealt = self._rows[number % self.ranges]
        return [int(row) for row in dealt[shuffle_numbers(len(dealt), self._seed, number)]]

    def batches(self, number: int, start: int) -> Iterator[Any]:
        rows, (rank, world) = self.rows(number), self._place
        step = self._size * world
        for first in range(start * step, len(rows) - step + 1, step):
            yield self._table[rows[first + rank : first + step : world]]


class RangeDataset(IterableDataset[Any]):
    """The batches of the current range; for a DataLoader with `batch_size=None`, with workers or without."""

    def __init__(self, batches: Batches) -> None:
        self.source = batches
        self._current = torch.zeros(2, dtype=torch.int64).share_memory_()  # range, first batch: workers read it

    def set_range(self, number: int, start: int = 0) -> None:
        """Have the next iterator yield this range, from batch `start` on."""
        self._current[0], self._current[1] = number, start

    def __iter__(self) -> Iterator[Any]:
        number, start = self._current.tolist()
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for at, batch in enumerate(self.source.batches(number, start)):
            if at % workers == mine:  # the loader takes one batch of each worker in turn: the order is kept
                yield batch


class Feed:
    """All batches of the ranges that this cluster is given, until the data or the run is at its end."""

    def __init__(self, outer: OuterLoop, loader: DataLoader[Any]) -> None:
        """Raise ConfigError if the loader's data set is not the one that the run agreed on."""
        if not isinstance(loader.dataset, RangeDataset) or loader.batch_size is not None:
            raise ConfigError("expected DataLoader(RangeDataset(…), batch_size=None, …): its batches are whole already")
        agreed, source = outer.shared.data, loader.dataset.source
        if agreed.ranges != source.ranges:
            raise ConfigError(f"shared.data.ranges: expected {source.ranges}, as the data set has, got {agreed.ranges}")
        if agreed.digest and source.digest and agreed.digest != source.digest:
            raise ConfigError(f"shared.data.digest: expected {source.digest}, this data set's, got {agreed.digest}")
        self._outer, self._loader, self._dataset = outer, loader, loader.dataset
        self._resume: tuple[int, int] | None = None
        self.number, self.cursor = -1, 0  # the current range, and how many of its batches were yielded

    def state_dict(self) -> dict[str, int]:
        """Where we are, for a checkpoint."""
        return {"number": self.number, "cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin in the middle of that range if it is the first that is given."""
        self._resume = (state["number"], state["cursor"])

    def __iter__(self) -> Iterator[Any]:
        for number in self._outer.ranges():
            resume, self._resume = self._resume, None
            self.number, self.cursor = number, resume[1] if resume and resume[0] == number else 0
            self._dataset.set_range(number, self.cursor)
            for batch in self._loader:
                self.cursor += 1
                yield batch
                if self._outer.finished:
                    return
