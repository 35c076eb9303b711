"""Batches come from ranges in one order, with workers or without; every sample of every range is in one of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dips.client.data import MOST_PARTS, Feed, RangeDataset, RowBatches, TokenBatches
from dips.config import Shared
from dips.data import DataSet
from dips.data.build import BuildPlan, build_dataset, parse_source
from dips.data.steps import Part
from dips.errors import ConfigError
from dips.protocol.data import BegunRange
from dips.protocol.options import DataOptions


class Outer:
    """What a feed needs of an OuterLoop: it hands out ranges, and notes when, and what the feed says of them."""

    def __init__(
        self, numbers: list[int], ranges: int = 6, digest: str = "", begun: dict[int, BegunRange] | None = None
    ) -> None:
        self.shared = Shared(run="r", data=DataOptions(ranges=ranges, digest=digest))
        self.finished, self.numbers, self.asked, self.range_recalls = False, list(numbers), 0, 0
        self.begun, self.range_begun = begun or {}, None if begun is None else next(iter(begun.values()))
        self.marks: list[tuple[tuple[int, ...], BegunRange | None]] = []
        self.remarks: list[str] = []

    def ranges(self) -> Iterator[int]:
        while self.numbers:
            self.asked += 1
            number = self.numbers.pop(0)
            self.range_begun = self.begun.get(number)
            yield number

    def mark_ranges(self, left: Sequence[int], begun: BegunRange | None = None) -> None:
        self.marks.append((tuple(left), begun))

    def remark(self, text: str) -> None:
        self.remarks.append(text)


@pytest.fixture(name="data")
def made_data(tmp_path: Path) -> DataSet:
    """Six ranges of about 500 tokens."""
    np.save(tmp_path / "t.npy", np.arange(3000, dtype=np.uint16))
    np.save(tmp_path / "t.documents.npy", np.arange(0, 3000, 50))
    build_dataset(BuildPlan((parse_source(f"t={tmp_path}/t.npy"),), tmp_path / "set", 6, 0))
    return DataSet(tmp_path / "set")


def feed(outer: Outer, data: Any, workers: int) -> Feed:
    """Workers are forks of a process that has imported torch, if these are the first: each would do so by itself."""
    multiprocessing.set_forkserver_preload(["torch.utils.data", "dips.client.data", "dips.data"])
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
    per_range = len(list(data.batches(3, 2, 16)))
    assert [b.tolist() for b in expected[:per_range]] == [b.tolist() for b in data.batches(3, 2, 16)]
    for at, (batch, plain) in enumerate(zip(feed(helped, batches, 2), expected, strict=True)):
        assert batch.dtype == torch.int64 and torch.equal(batch, plain)
        assert helped.asked == 1 or at >= per_range


def rows_of(batches: Any) -> list[list[int]]:
    return [row for batch in batches for row in batch.tolist()]


def sequences_of(data: DataSet, numbers: Sequence[int], length: int = 16) -> list[list[int]]:
    """All sequences of some ranges, in order."""
    return [
        row
        for number in numbers
        for row in data.read_sequences(number, length, np.arange(data.sequences(number, length))).tolist()
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_was_left_goes_on_where_it_was(data: DataSet, workers: int) -> None:
    """A script that takes some batches at a time: each once, in order, and no range before the last is used up."""
    batches = TokenBatches(data, 4, 16)
    expected = list(feed(Outer([3, 0, 5]), batches, 0))
    outer, found = Outer([3, 0, 5]), list[torch.Tensor]()
    some = feed(outer, batches, workers)
    while taken := list(islice(some, 3)):
        found += taken
        assert outer.asked <= 1 + len(found) // 7, "seven batches a range"
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_a_loop_that_was_left_takes_nothing_that_was_recalled(data: DataSet) -> None:
    """Nor anything of a run that is over."""
    outer = Outer([3, 0])
    some = feed(outer, TokenBatches(data, 4, 16), 0)
    assert len(list(islice(some, 2))) == 2
    outer.range_recalls = 1
    next(iter(some))
    assert (outer.asked, some.number) == (2, 0)
    outer.finished, outer.numbers = True, []
    assert list(some) == []


def test_sequences_that_no_range_holds_are_refused(data: DataSet) -> None:
    """All ranges of the run were used up and settled by pushes of nothing, without one step or word."""
    with pytest.raises(ConfigError, match="each data range is shorter than one sequence"):
        feed(Outer([0]), TokenBatches(data, 1, 1000), 0)


@pytest.mark.parametrize(("sequences", "world"), [(1, 1), (4, 1), (7, 1), (4, 2), (25, 3), (40, 1), (500, 1)])
def test_nothing_is_left_behind(data: DataSet, sequences: int, world: int) -> None:
    """Whatever a step takes, less than a range or more than two: every sequence once, the last step is smaller."""
    numbers = [3, 0, 5, 1]
    feeds = [feed(Outer(numbers), TokenBatches(data, sequences, 16, rank, world), 0) for rank in range(world)]
    steps = [[(batch.tolist(), one.samples) for batch in one] for one in feeds]
    counts = [samples for _, samples in steps[0]]
    assert all([samples for _, samples in mine] == counts for mine in steps), "the ranks take the same steps"
    expected, trained = sequences_of(data, numbers), []
    for at, count in enumerate(counts):
        shares = [mine[at][0] for mine in steps]
        assert len({len(share) for share in shares}) == 1, "as many on every rank"
        rows = [shares[i % world][i // world] for i in range(count)]
        trained += rows
    assert trained == expected and sum(counts) == len(expected)
    assert set(counts[:-1]) <= {sequences * world} and counts[-1] <= sequences * world


def test_what_is_left_is_marked_step_by_step(data: DataSet) -> None:
    """With each batch the outer loop knows which ranges have samples to train, and how far the first of them is."""
    outer, count = Outer([3, 4]), [data.sequences(number, 16) for number in (3, 4)]
    batches = feed(outer, TokenBatches(data, 20, 16), 0)
    seen = [outer.marks[-1] for _ in batches]
    first, second = count
    assert first > 20 and first % 20 and second > 20
    expected: list[tuple[tuple[int, ...], BegunRange | None]] = []
    for done in range(20, first + second, 20):
        here = BegunRange(3, done, first) if done < first else BegunRange(4, done - first, second)
        expected.append(((here.number,), here))
    assert seen == [*expected, ((), None)]
    assert (batches.number, batches.cursor, batches.samples) == (4, second, (first + second) % 20)


@pytest.mark.parametrize(("sequences", "world"), [(2, 1), (1, 4), (3, 2)])
def test_a_feed_goes_on_in_the_middle_of_a_range(data: DataSet, sequences: int, world: int) -> None:
    """Five steps of two ranks are trained: another number of ranks goes on with the very next sequence."""
    outer = Outer([3, 4])
    whole = feed(outer, TokenBatches(data, 1, 16, 0, 2), 0)
    for _, _ in zip(range(5), whole, strict=False):
        pass
    (left, begun), state = outer.marks[-1], whole.state_dict()
    assert (left, begun) == ((3,), BegunRange(3, 10, data.sequences(3, 16)))
    again = Outer([3, 4], begun={3: begun})
    feeds = [feed(again, TokenBatches(data, sequences, 16, rank, world), 0) for rank in range(1)]
    feeds[0].load_state_dict(state)
    first = next(iter(feeds[0])).tolist()
    assert first == sequences_of(data, [3])[10 : 10 + sequences * world : world]
    with pytest.raises(ConfigError, match=r"data range 3: expected 31 samples, .* it has 15"):
        feed(again, TokenBatches(data, 1, 32), 0).load_state_dict(state)


def test_another_sequence_length_begins_anew_and_is_told(data: DataSet) -> None:
    """What another cluster has trained of a range counts only if it cuts ranges into as many samples."""
    outer = Outer([3], begun={3: BegunRange(3, 10, 99)})
    assert rows_of(feed(outer, TokenBatches(data, 4, 16), 0)) == sequences_of(data, [3])
    assert "99 where 10 of them were trained" in outer.remarks[0] and "one sequence length" in outer.remarks[0]


def test_a_range_smaller_than_a_step_is_told(data: DataSet) -> None:
    """Once, with the remedy."""
    outer = Outer([3, 4, 5])
    list(feed(outer, TokenBatches(data, 40, 16), 0))
    assert len(outer.remarks) == 1 and "fewer than a step, which takes 40" in outer.remarks[0]


def test_ranges_that_are_taken_back_are_forgotten(data: DataSet) -> None:
    """Work was lost in the middle of a range: what was left of it is dropped, and it is given again."""
    outer, seen = Outer([3, 4]), list[list[int]]()
    for count, batch in enumerate(feed(outer, TokenBatches(data, 10, 16), 0), 1):
        seen += batch.tolist()
        if count == 2:
            outer.range_recalls, outer.numbers = 1, [3, 4]
    assert seen == sequences_of(data, [3])[:20] + sequences_of(data, [3, 4])


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
    with pytest.raises(ConfigError, match="in_order=True"):
        Feed(Outer([]), DataLoader(RangeDataset(batches), batch_size=None, num_workers=2, in_order=False))  # type: ignore[arg-type]


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
        rows = RowBatches(Table(), 6, 5, sources=["a"] * 60 + ["b"] * 180, rank=rank, world=2)
        list(feed(Outer([*range(6)]), rows, 0))
    assert sorted(table.read) == list(range(240))


def test_a_hugging_face_data_set() -> None:
    """The real library: columns come back, over all ranges each row once."""
    library = pytest.importorskip("datasets")
    table = library.Dataset.from_dict({"text": [f"t{i}" for i in range(60)], "source": ["a", "b", "b"] * 20})
    batches = RowBatches(table, 6, 1, sources=table["source"][:])
    seen = [text for batch in feed(Outer([*range(6)]), batches, 0) for text in batch["text"]]
    assert sorted(seen) == sorted(table["text"])
    assert table.select(batches.rows(3))["source"][:].count("a") in (3, 4)


def test_what_is_taken_back_before_the_first_step_is_known(data: DataSet) -> None:
    """The feed says that it marks its steps before it asks for a range: from then on the agent has it forget ranges
    that the cluster has lost, and would not while steps may be unmarked.
    """
    outer, asked = Outer([3]), list[int]()
    ranges = outer.ranges
    outer.ranges = lambda: (asked.append(len(outer.marks)), ranges())[1]  # type: ignore[method-assign]
    next(iter(feed(outer, TokenBatches(data, 2, 16), 0)))
    assert asked == [1] and outer.marks[0] == ((), None)


def test_a_range_of_exactly_one_step(data: DataSet) -> None:
    """It is a step as soon as it is given: no further range is asked for first, and it is not too small."""
    outer, size = Outer([3, 4]), data.sequences(3, 16)
    first = next(iter(feed(outer, TokenBatches(data, size, 16), 0)))
    assert first.tolist() == sequences_of(data, [3]) and outer.asked == 1 and not outer.remarks


def test_ranges_that_were_taken_back_are_marked_no_more(data: DataSet) -> None:
    """Before the next one is asked for: the agent would count what is marked as still to be trained."""
    outer = Outer([3])
    batches = iter(feed(outer, TokenBatches(data, 10, 16), 0))
    next(batches)
    outer.range_recalls, outer.numbers = 1, [4]
    next(batches)
    assert [left for left, _ in outer.marks] == [(), (3,), (3,), (), (4,), (4,)]


def test_the_parts_of_a_step_lie_on_the_host(data: DataSet) -> None:
    """Under torch.set_default_device they were on an accelerator, which no worker of a DataLoader can read."""
    with torch.device("meta"):
        made = RangeDataset(TokenBatches(data, 2, 16))
        made.set_parts([Part(3, 0, 2, 10)])
    assert [batch.tolist() for batch in made] == [sequences_of(data, [3])[:2]]


def test_the_parts_of_a_step_are_bounded(data: DataSet) -> None:
    """As many as the workers' memory has room for."""
    made = RangeDataset(TokenBatches(data, 2, 16))
    made.set_parts([Part(3, 0, 1, 31)] * MOST_PARTS)
    with pytest.raises(ConfigError, match="build a data set of fewer ranges"):
        made.set_parts([Part(3, 0, 1, 31)] * (MOST_PARTS + 1))
