"""Batches come from ranges in one order, with workers or without, and a range ends before the next is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dips.client.data import Feed, RangeDataset, RowBatches, TokenBatches
from dips.config import Shared
from dips.data import DataSet
from dips.data.build import BuildPlan, build_dataset, parse_source
from dips.errors import ConfigError
from dips.protocol.options import DataOptions


class Outer:
    """What a feed needs of an OuterLoop: it hands out ranges, and notes when."""

    def __init__(self, numbers: list[int], ranges: int = 6, digest: str = "") -> None:
        self.shared = Shared(run="r", data=DataOptions(ranges=ranges, digest=digest))
        self.finished, self._numbers, self.asked = False, numbers, 0

    def ranges(self) -> Iterator[int]:
        for number in self._numbers:
            self.asked += 1
            yield number


@pytest.fixture(name="data")
def made_data(tmp_path: Path) -> DataSet:
    """Six ranges of about 500 tokens."""
    np.save(tmp_path / "t.npy", np.arange(3000, dtype=np.uint16))
    np.save(tmp_path / "t.documents.npy", np.arange(0, 3000, 50))
    build_dataset(BuildPlan((parse_source(f"t={tmp_path}/t.npy"),), tmp_path / "set", 6, 0))
    return DataSet(tmp_path / "set")


def feed(outer: Outer, data: Any, workers: int) -> Feed:
    loader: DataLoader[Any] = DataLoader(
        RangeDataset(data),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="forkserver" if workers else None,
    )
    return Feed(outer, loader)  # type: ignore[arg-type]


def test_workers_change_nothing(data: DataSet) -> None:
    """With two workers the batches are those without, in order; a range is asked for when the last is used up."""
    batches = TokenBatches(data, 2, 16)
    alone, helped = Outer([3, 0, 5]), Outer([3, 0, 5])
    expected = list(feed(alone, batches, 0))
    assert [b.tolist() for b in expected] == [b.tolist() for number in (3, 0, 5) for b in data.batches(number, 2, 16)]
    per_range = len(list(data.batches(3, 2, 16)))
    for at, (batch, plain) in enumerate(zip(feed(helped, batches, 2), expected, strict=True)):
        assert batch.dtype == torch.int64 and torch.equal(batch, plain)
        assert helped.asked == 1 or at >= per_range


def test_a_feed_goes_on_in_the_middle_of_a_range(data: DataSet) -> None:
    """A checkpoint's cursor skips what was trained of that range, and only if that range comes first."""
    batches = TokenBatches(data, 2, 16)
    whole = feed(Outer([3, 4]), batches, 0)
    given = []
    for batch in whole:
        given.append(batch)
        if len(given) == 5:
            break
    state = whole.state_dict()
    assert state == {"number": 3, "cursor": 5}
    again, other = feed(Outer([3, 4]), batches, 0), feed(Outer([4, 3]), batches, 0)
    for one in (again, other):
        one.load_state_dict(state)
    expected = list(feed(Outer([3, 4]), batches, 0))
    assert [b.tolist() for b in again] == [b.tolist() for b in expected[5:]]
    assert len(list(other)) == len(expected)


def test_a_feed_ends_with_the_run(data: DataSet) -> None:
    """What is left of a range is not given when the run is over."""
    outer = Outer([3, 4])
    for count, _ in enumerate(feed(outer, TokenBatches(data, 2, 16), 0), 1):
        outer.finished = count == 3
    assert count == 3


def test_the_wrong_data_set_is_refused(data: DataSet) -> None:
    """Ranges and digest are what the run agreed on, or nobody trains."""
    batches = TokenBatches(data, 2, 16)
    with pytest.raises(ConfigError, match=r"shared.data.ranges: expected 6"):
        feed(Outer([], ranges=7), batches, 0)
    with pytest.raises(ConfigError, match=r"shared.data.digest"):
        feed(Outer([], digest="0" * 64), batches, 0)
    feed(Outer([], digest=data.digest), batches, 0)
    with pytest.raises(ConfigError, match="batch_size=None"):
        Feed(Outer([]), DataLoader(RangeDataset(batches), batch_size=2))  # type: ignore[arg-type]


def test_rows_of_a_table() -> None:
    """A table read by row numbers: each rank gets its share, over all ranges each row once, and nothing is copied."""
    table = SimpleNamespace(read=[])

    class Table:
        def __len__(self) -> int:
            return 240

        def __getitem__(self, rows: list[int]) -> list[int]:
            table.read.extend(rows)
            return rows

    for rank in (0, 1):
        for number in range(6):
            list(RowBatches(Table(), 6, 5, sources=["a"] * 60 + ["b"] * 180, rank=rank, world=2).batches(number, 0))
    assert sorted(table.read) == list(range(240))


def test_a_hugging_face_data_set() -> None:
    """The real library: columns come back, over all ranges each row once."""
    library = pytest.importorskip("datasets")
    table = library.Dataset.from_dict({"text": [f"t{i}" for i in range(60)], "source": ["a", "b", "b"] * 20})
    batches = RowBatches(table, 6, 1, sources=table["source"][:])
    seen = [text for number in range(6) for batch in batches.batches(number, 0) for text in batch["text"]]
    assert sorted(seen) == sorted(table["text"])
    assert table.select(batches.rows(3))["source"][:].count("a") in (3, 4)
