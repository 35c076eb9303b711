"""The Trainer's batches from the data ranges that its cluster leases, so that no row is trained twice in the run.

Every cluster gives its Trainer the same `train_dataset`; its rows are dealt into `shared.data.ranges` ranges, and the
Trainer reads the rows of those that the outer loop is given. A range counts when its last optimizer step is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from dips.client.data import Feed, RangeDataset, RowBatches
from dips.client.rank.joining import find_config
from dips.errors import ConfigError

if TYPE_CHECKING:
    from dips.client.transformers import OuterCallback

NO_LIMIT = 1_000_000_000  # max_steps of a Trainer that the run ends


def lease_ranges(trainer: Trainer, callback: OuterCallback, seed: int = 0) -> None:
    """Have the Trainer train on the ranges that `callback` leases; nothing changes if the run has none.

    seed  of which rows are a range; the same in all clusters
    Call it before `train`. The Trainer's collator and number of workers are kept; its sampler is not used.
    """
    make_loader = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        ranges = find_config(callback.config).shared.data.ranges
        if not ranges:
            return make_loader()
        trainer.args.ignore_data_skip = True  # the outer state knows where it was
        if trainer.args.max_steps <= 0:
            trainer.args.max_steps = NO_LIMIT  # nobody knows how many ranges this cluster will be given
        callback.loader = LeasedLoader(trainer, callback, make_loader(), ranges, seed)
        return callback.loader

    trainer.get_train_dataloader = get_train_dataloader  # type: ignore[method-assign]


class LeasedLoader:
    """One rank's micro-batches, in the order of the leased ranges; ends the training when there are no more."""

    def __init__(
        self, trainer: Trainer, callback: OuterCallback, plain: DataLoader[Any], ranges: int, seed: int
    ) -> None:
        """`plain`: the Trainer's own; raise ConfigError if its rows have no numbers, or a range too few of them."""
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
            collate_fn=_Collate(plain.collate_fn, args.train_batch_size),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
        )
        self._feed: Feed | None = None

    def state_dict(self) -> dict[str, int]:
        """Where it is, for a checkpoint."""
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
    """Rows by their numbers, as a collator wants them."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, numbers: Sequence[int]) -> list[Any]:
        return [self._table[number] for number in numbers]


class _Collate:
    """The rows of an optimizer step into its micro-batches."""

    def __init__(self, collate: Any, size: int) -> None:
        self._collate, self._size = collate, size

    def __call__(self, rows: list[Any]) -> list[Any]:
        return [self._collate(rows[at : at + self._size]) for at in range(0, len(rows), self._size)]
