"""Sequences of a range, read from the files: what they are, and that no range is loaded for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dips.data import DataSet, reader
from dips.data.build import BuildPlan, build_dataset, parse_source
from dips.data.deal import shuffle_numbers
from dips.errors import ConfigError
from tests.open_files import list_open_files

SEED, LENGTH = 3, 16


TYPES = {"one type": ("u2", "u2"), "two types": ("u2", "u4"), "no type of both": ("u8", "i8")}


@pytest.fixture(params=TYPES)
def data(request: pytest.FixtureRequest, tmp_path: Path) -> DataSet:
    """Documents of 1 to 90 tokens in two files: some end where a sequence does, most do not."""
    rng, sources = np.random.default_rng(0), []
    for name, dtype in zip(("a", "b"), TYPES[request.param], strict=True):
        lengths = rng.integers(1, 91, 60)
        np.save(tmp_path / f"{name}.npy", rng.integers(0, 60_000, lengths.sum()).astype(dtype))
        np.save(tmp_path / f"{name}.documents.npy", np.concatenate([[0], np.cumsum(lengths)[:-1]]))
        sources.append(parse_source(f"{name}={tmp_path}/{name}.npy"))
    build_dataset(BuildPlan(tuple(sources), tmp_path / "set", 4, SEED))
    return DataSet(tmp_path / "set")


@pytest.mark.parametrize("number", [0, 3, 6])
def test_sequences_are_cut_from_the_tokens_of_the_range(data: DataSet, number: int) -> None:
    """In the range's order, of this epoch; over ends of documents and files; in the type that holds all of them."""
    tokens = data.tokens(number)
    count = data.sequences(number, LENGTH)
    order = shuffle_numbers(count, SEED, number) * LENGTH
    expected = tokens[order[:, None] + np.arange(LENGTH + 1)]
    found = data.read_sequences(number, LENGTH, np.arange(count))
    assert np.array_equal(found, expected) and found.dtype == tokens.dtype and found.dtype.kind in "iu"
    some = np.array([5, 0, 5])
    assert np.array_equal(data.read_sequences(number, LENGTH, some), expected[some])


@pytest.mark.parametrize(
    "wrong",
    [{"sequences": 0}, {"length": 0}, {"world": 0}, {"rank": 2}, {"rank": -1}, {"start": -1}],
    ids=lambda wrong: " ".join(f"{key} {value}" for key, value in wrong.items()),
)
def test_batches_of_a_rank_that_cannot_be_are_refused(data: DataSet, wrong: dict[str, int]) -> None:
    """A rank beyond the last, or a cursor before the begin, would train what other ranks or batches train."""
    with pytest.raises(ConfigError, match="expected at least one sequence of at least one token, and a rank below"):
        next(data.batches(0, **{"sequences": 2, "length": LENGTH, "rank": 1, "world": 2, "start": 0, **wrong}))


def test_no_range_is_loaded_for_a_batch(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker would hold all of it, and training would stand at each range's begin: 17 tokens are read."""
    read = 0
    open_file = data._open_file

    class Counted:
        def __init__(self, tokens: Any) -> None:
            self._tokens = tokens

        def __getitem__(self, cut: slice) -> Any:
            nonlocal read
            found = self._tokens[cut]
            read += len(found)
            return found

    monkeypatch.setattr(data, "_open_file", lambda file: Counted(open_file(file)))
    data.read_sequences(0, LENGTH, np.array([2]))
    assert LENGTH + 1 <= read <= LENGTH + 91, "slices of the documents that the sequence touches"


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range has documents of all files, and each map keeps its file open: a thousand of them met the usual limit."""
    for i in range(8):
        np.save(tmp_path / f"{i}.npy", np.full(20, i, np.uint16))
    build_dataset(BuildPlan((parse_source(f"x={tmp_path}/[0-9].npy"),), tmp_path / "set", 1, SEED, eos=99))
    monkeypatch.setattr(reader, "OPEN_FILES", 3)
    data = DataSet(tmp_path / "set")
    before, most, open_file = list_open_files(), 0, data._open_file

    def count_open(file: int) -> Any:
        nonlocal most
        found = open_file(file)
        most = max(most, len(list_open_files() - before))
        return found

    monkeypatch.setattr(data, "_open_file", count_open)
    assert sorted(data.tokens(0).tolist()) == sorted([*range(8)] * 20)
    data.read_sequences(0, LENGTH, np.arange(data.sequences(0, LENGTH)))
    assert 3 <= most <= 4, "and the one that was read last"


def test_a_range_without_documents_has_no_sequences(tmp_path: Path) -> None:
    """More ranges than documents."""
    np.save(tmp_path / "t.npy", np.arange(40, dtype=np.uint16))
    np.save(tmp_path / "t.documents.npy", np.array([0]))
    build_dataset(BuildPlan((parse_source(f"t={tmp_path}/t.npy"),), tmp_path / "set", 3, SEED))
    data = DataSet(tmp_path / "set")
    counts = [data.sequences(number, LENGTH) for number in range(3)]
    assert sorted(counts) == [0, 0, 2]
    for number, count in enumerate(counts):
        assert data.read_sequences(number, LENGTH, np.arange(count)).shape == (count, LENGTH + 1)


def test_what_moves_to_a_worker_is_small(data: DataSet) -> None:
    """Neither maps nor the range that was read last."""
    data.read_sequences(0, LENGTH, np.array([0]))
    state = data.__getstate__()
    assert state["_maps"] == {} and state["_last"] is None
