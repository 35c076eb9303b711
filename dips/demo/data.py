"""Real text that is on every machine: the source files of the running Python's standard library, as bytes.

Each file is used for either training or validation. Training text is cut into blocks, which are
shuffled by a seed, so that every range is a fair sample of all files, and dealt into many ranges, which clusters lease.
The same Python and seed give the same bytes and ranges on every rank.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

Text = npt.NDArray[np.uint8]

BLOCK_BYTES = 2048  # consecutive bytes of text
RANGE_BLOCKS = 32  # a range is a handful of inner steps
VALIDATION_EVERY = 20  # one file in 20 is used for validation
# Files that are not the library's own, or that are deliberately malformed.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "data", "bad_coding.py", "bad_coding2.py"})


@dataclass(frozen=True)
class Corpus:
    """Training blocks, in the order of the ranges, and validation bytes."""

    training: Text  # [ranges · RANGE_BLOCKS, BLOCK_BYTES]
    validation: Text  # [bytes]

    @property
    def ranges(self) -> int:
        """The number of ranges in the training text."""
        return len(self.training) // RANGE_BLOCKS

    def batches(self, range_id: int, sequences: int, length: int, rank: int = 0, world: int = 1) -> Iterator[Text]:
        """Yield one rank's batches of a range, uint8[sequences, length + 1] each, the same number on every rank.

        range_id   any number; range e·ranges + i is range i in epoch e
        sequences  of this rank in one inner step; the ranks' shares do not overlap
        length     bytes predicted in a sequence; one more byte is returned
        """
        start = range_id % self.ranges * RANGE_BLOCKS
        blocks = self.training[start : start + RANGE_BLOCKS]
        firsts = range(0, BLOCK_BYTES - length, length)
        table = np.concatenate([blocks[:, at : at + length + 1] for at in firsts])  # neighbours of different blocks
        for first in range(0, len(table) - sequences * world + 1, sequences * world):
            yield table[first + rank : first + sequences * world : world]

    def validation_sample(self, rows: int, length: int) -> Text:
        """Return validation sequences, evenly spaced: uint8[rows, length + 1]."""
        starts = np.linspace(0, len(self.validation) - length - 1, rows).astype(np.int64)
        return self.validation[starts[:, None] + np.arange(length + 1)]


@cache
def load_corpus(seed: int) -> Corpus:
    """Read the standard library's sources; `seed` shuffles the training blocks."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return from_files(source_files(root), seed)


def source_files(root: Path) -> list[Path]:
    """Return the Python files below `root` in an order that depends on their names alone."""
    found = [p for p in root.rglob("*.py") if not LEFT_OUT.intersection(p.relative_to(root).parts)]
    return sorted(found, key=lambda p: p.relative_to(root).parts)


def from_files(files: list[Path], seed: int) -> Corpus:
    """Split and shuffle files: every VALIDATION_EVERY-th file validates; an incomplete last range is omitted."""
    text = _read_files([f for i, f in enumerate(files) if i % VALIDATION_EVERY])
    ranges = len(text) // (RANGE_BLOCKS * BLOCK_BYTES)
    blocks = text[: ranges * RANGE_BLOCKS * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
    order = list(range(len(blocks)))
    random.Random(seed).shuffle(order)  # the standard library's, which does not depend on numpy's version
    return Corpus(blocks[order], _read_files(files[::VALIDATION_EVERY]))


def _read_files(files: list[Path]) -> Text:
    return np.frombuffer(b"\n".join(f.read_bytes() for f in files), np.uint8)


def bigram_entropy(sequences: Text) -> float:
    """Return H(next byte | byte) of the pairs in the sequences, in nats: the loss of a bigram table of this same text.

    A model with a lower loss has learned more than which byte follows which.
    """
    pairs = sequences[:, :-1].astype(np.int64) * 256 + sequences[:, 1:]
    counts = np.bincount(pairs.reshape(-1), minlength=256 * 256).reshape(256, 256).astype(np.float64)
    rows = counts.sum(axis=1, keepdims=True)
    share = np.divide(counts, rows, out=np.ones_like(counts), where=counts > 0)
    return float(-(counts * np.log(share)).sum() / counts.sum())
