"""Reads a data set: the tokens of a range, and batches of sequences cut from them, the same on every machine.

Range e·ranges + i is range i in epoch e: the same tokens, with its sequences in another order. Sequences are read from
the files on demand: in memory are only the order and the documents' offsets of the last range read. Safe to copy into
other processes: files are opened when they are first read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dips.data import index
from dips.data.deal import I64, shuffle_numbers
from dips.data.index import Tokens
from dips.errors import ConfigError

OPEN_FILES = 256  # at once: a map keeps its file open, and 1,024 is a process's usual limit


@dataclass(frozen=True, slots=True)
class OpenRange:
    """The range whose sequences were read last."""

    number: int
    length: int  # tokens of its sequences
    documents: Any  # (file, tokens, first token) of each
    begins: I64  # offset of each document in the range's tokens, and of their end
    order: I64  # first token of each of its sequences, in the order of reading
    dtype: np.dtype[Any]


def _common_type(dtypes: Sequence[npt.DTypeLike]) -> np.dtype[Any]:
    """Return the type that holds the tokens of files of these; numpy would make uint64 and a signed one fractions."""
    common = np.result_type(*(dtypes or ["u2"]))
    return common if common.kind in "iu" else np.dtype(np.int64)


class DataSet:
    """A directory made by `dips data build`."""

    def __init__(self, directory: str | Path, *, verify: bool = False) -> None:
        """Open the data set; `verify` compares every byte with its digest, which takes as long as reading it.

        Errors  ConfigError: there is no data set, or a file of it is missing. Corrupt: a file is not as it was written.
        """
        self._index = index.open_index(Path(directory), verify)
        self._maps: dict[int, Tokens] = {}
        self._last: OpenRange | None = None
        self._seed = int(self._index.manifest["seed"])

    @property
    def digest(self) -> str:
        """Identifies tokens and ranges: equal on two clusters if they hold the same data set."""
        return self._index.digest

    @property
    def ranges(self) -> int:
        """Number of ranges: the run's `data.ranges`."""
        return len(self._index.bounds) - 1

    def tokens(self, number: int) -> Tokens:
        """Return the tokens of a range, its documents one after another, as a 1-D integer array."""
        place = number % self.ranges
        documents = self._index.documents[self._index.bounds[place] : self._index.bounds[place + 1]]
        found, at = np.empty(int(documents["tokens"].sum(dtype=np.int64)), self._type_of(documents)), 0
        for file, tokens, start in documents.tolist():
            found[at : at + tokens] = self._open_file(file)[start : start + tokens]
            at += tokens
        return found

    def batches(
        self, number: int, sequences: int, length: int, rank: int = 0, world: int = 1, start: int = 0
    ) -> Iterator[Tokens]:
        """Iterate over one rank's batches of a range: [sequences, length + 1] tokens each, the same number on every
        rank.

        Tokens after the last whole batch of the range are not returned; `dips.client.data` carries them over.

        number     any range; above `ranges` it is one of a later epoch
        sequences  of this rank in one inner step; the ranks' shares do not overlap
        length     tokens predicted in a sequence; the one before the first is returned too
        start      the cursor: number of batches of this range that were trained already
        """
        if min(sequences, length, world) < 1 or not 0 <= rank < world or start < 0:
            raise ConfigError(
                "expected at least one sequence of at least one token, and a rank below world; "
                f"got sequences={sequences}, length={length}, rank={rank}, world={world}, start={start}"
            )
        step = sequences * world
        for first in range(start * step, self.sequences(number, length) - step + 1, step):
            yield self.read_sequences(number, length, np.arange(first + rank, first + step, world))

    def sequences(self, number: int, length: int) -> int:
        """Return the number of sequences of `length` tokens in a range; each is trained once."""
        place = number % self.ranges
        documents = self._index.documents[self._index.bounds[place] : self._index.bounds[place + 1]]
        return max(int(documents["tokens"].sum(dtype=np.int64)) - 1, 0) // length

    def read_sequences(self, number: int, length: int, places: I64) -> Tokens:
        """Read the sequences at these places of the range's order: [places, length + 1] tokens."""
        of = self._last
        if of is None or (of.number, of.length) != (number, length):
            of = self._last = self._open_range(number, length)
        found = np.empty((len(places), length + 1), of.dtype)
        for row, first in zip(found, of.order[places].tolist(), strict=True):
            self._read_row(of, first, row)
        return cast(Tokens, found)

    def _open_range(self, number: int, length: int) -> OpenRange:
        place = number % self.ranges
        documents = self._index.documents[self._index.bounds[place] : self._index.bounds[place + 1]]
        begins = np.concatenate([[0], np.cumsum(documents["tokens"], dtype=np.int64)])
        order = shuffle_numbers(self.sequences(number, length), self._seed, number) * length
        return OpenRange(number, length, documents, begins, order, self._type_of(documents))

    def _type_of(self, documents: Any) -> np.dtype[Any]:
        return _common_type([self._index.files[file].dtype for file in np.unique(documents["file"]).tolist()])

    def _read_row(self, of: OpenRange, first: int, row: Tokens) -> None:
        """Fill a row with the range's tokens from `first` on."""
        number, filled = int(np.searchsorted(of.begins, first, side="right")) - 1, 0
        while filled < len(row):
            file, tokens, start = of.documents[number].tolist()
            skipped = first + filled - int(of.begins[number])
            part = self._open_file(file)[start + skipped : start + tokens][: len(row) - filled]
            row[filled : filled + len(part)] = part
            number, filled = number + 1, filled + len(part)

    def steps(self, number: int, sequences: int, length: int, world: int = 1) -> int:
        """Return the number of batches that a rank gets from a range."""
        return self.sequences(number, length) // (sequences * world)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}, "_last": None}

    def _open_file(self, file: int) -> Tokens:
        if file not in self._maps:
            if len(self._maps) >= OPEN_FILES:
                del self._maps[next(iter(self._maps))]
            self._maps[file] = self._index.files[file].open()
        return self._maps[file]
