"""Batches for the Trainer from the data ranges that its cluster leases, so that no row is trained twice in the run.

Every cluster gives its Trainer the same `train_dataset`; its rows are dealt into `shared.data.ranges` ranges, and the
Trainer reads the rows of the ranges leased to the outer loop. A range counts as trained after its last optimizer step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from dips.client.data import Feed, RangeDataset, RowBatches
from dips.client.rank.joining import find_config
from dips.client.rank.outer_loop import OuterLoop
from dips.errors import ConfigError

NO_LIMIT = 1_000_000_000  # max_steps of a Trainer whose training ends with the run


class RangeTaker(Protocol):
    """The attributes of OuterCallback that this module uses."""

    config: str | os.PathLike[str] | None
    outer: OuterLoop | None
    loader: LeasedLoader | None
    resumed_feed: dict[str, int]


def lease_ranges(trainer: Trainer, callback: RangeTaker, seed: int = 0) -> None:
    """Make the Trainer train on the ranges that `callback` leases; has no effect if the run has no data ranges.

    seed  decides which rows form a range; must be the same in all clusters

    Call it before `train`. The Trainer's collator and number of workers are kept; its sampler is not used.
    """
    make_loader = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        ranges = find_config(callback.config).shared.data.ranges
        if not ranges:
            return make_loader()
        trainer.args.ignore_data_skip = True  # the outer state holds the position
        if trainer.args.max_steps <= 0:
            trainer.args.max_steps = NO_LIMIT  # the number of ranges that this cluster will lease is unknown
        callback.loader = LeasedLoader(trainer, callback, make_loader(), ranges, seed)
        return callback.loader

    trainer.get_train_dataloader = get_train_dataloader  # type: ignore[method-assign]


class LeasedLoader:
    """One rank's micro-batches, in the order of the leased ranges; stops the Trainer when there are no more ranges."""

    def __init__(self, trainer: Trainer, callback: RangeTaker, plain: DataLoader[Any], ranges: int, seed: int) -> None:
        """Wrap `plain`, the Trainer's own loader. Raises ConfigError if its rows are not numbered or its ranges too
        small.
        """
        self._trainer, self._callback, args = trainer, callback, trainer.args
        if not hasattr(plain.dataset, "__len__"):
            raise ConfigError("train_dataset: expected rows with numbers (__len__, __getitem__), to deal into ranges")
        rows, size = len(plain.dataset), args.train_batch_size * args.gradient_accumulation_steps
        if rows // ranges < size * args.world_size:
            raise ConfigError(
                f"train_dataset: {rows} rows in shared.data.ranges {ranges} are fewer than one optimizer step takes, "
                f"{size * args.world_size}: make fewer ranges"
            )
        batches = RowBatches(
            _Examples(plain.dataset), ranges, size, seed, rank=args.process_index, world=args.world_size
        )
        self._loader = DataLoader(
            RangeDataset(batches),
            batch_size=None,
            collate_fn=CollateStep(plain.collate_fn, args.gradient_accumulation_steps),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
        )
        self._feed: Feed | None = None

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, for a checkpoint."""
        return self._feed.state_dict() if self._feed is not None else {}

    def __iter__(self) -> Iterator[Any]:
        assert self._callback.outer is not None, "the Trainer begins before it reads"
        self._feed = Feed(self._callback.outer, self._loader)
        if self._callback.resumed_feed:
            self._feed.load_state_dict(self._callback.resumed_feed)
        for micro_batches in self._feed:
            yield from micro_batches
        self._trainer.control.should_training_stop = True


class _Examples:
    """A data set that returns lists of rows by their numbers, as a collator expects them."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, numbers: Sequence[int]) -> list[Any]:
        return [self._table[number] for number in numbers]


class CollateStep:
    """Splits the rows of an optimizer step into the number of micro-batches that the Trainer expects."""

    def __init__(self, collate: Callable[[list[Any]], Any], count: int) -> None:
        self._collate, self._count = collate, count

    def __call__(self, rows: list[Any]) -> list[Any]:
        """Return micro-batches of nearly equal size; if the last step has too few rows, some rows are repeated."""
        enough = [rows[i % len(rows)] for i in range(max(len(rows), self._count))]
        ends = [len(enough) * i // self._count for i in range(self._count + 1)]
        return [self._collate(enough[a:b]) for a, b in pairwise(ends)]
