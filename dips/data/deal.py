"""Deals documents into ranges so that every range is a fair sample of every source (§4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dips.errors import ConfigError

# ---- order ----------------------------------------------------------------------------------------------------------
# Permutations that depend only on seeds: the same on every machine and with every version of numpy.
#
# Numpy does not promise stable streams of its generators, so a mixing function of three lines is used.


U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def shuffle_numbers(count: int, *seeds: int) -> I64:
    """Return a permutation of the numbers 0 … count − 1 that depends on the seeds: int64[count]."""
    state = 0
    for seed in seeds:
        state = int(_mix_bits(np.array([(state ^ (seed & _MASK)) & _MASK], np.uint64))[0])
    keys = _mix_bits(np.arange(count, dtype=np.uint64) ^ np.uint64(state))
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def _mix_bits(x: U64) -> U64:
    """Apply splitmix64's step (Steele, Lea and Flood 2014): a bijective, random-looking map of 64 bits."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# ---- balance --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceBalance:
    """Shares of one source, from 0 to 1."""

    share: float  # of the whole data set
    least: float  # in the range with the smallest share
    most: float

    @property
    def deviation(self) -> float:
        """The largest difference, over ranges and sources, between a source's share of a range and of the data set."""
        return max(self.share - self.least, self.most - self.share)


@dataclass(frozen=True)
class Balance:
    """The balance of all sources, and the lengths of the ranges in tokens."""

    sources: tuple[SourceBalance, ...]
    shortest: int
    mean: float
    longest: int

    @property
    def deviation(self) -> float:
        return max(source.deviation for source in self.sources)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "deviation": self.deviation}


def weigh_sources(shares: I64) -> Balance:
    """Compute the balance from tokens by range and source, int64[ranges, sources]; an empty range has a share of 0 of
    each.
    """
    lengths = shares.sum(axis=1)
    inside = shares / np.maximum(lengths, 1)[:, None]
    whole = shares.sum(axis=0) / max(int(lengths.sum()), 1)
    sources = (
        SourceBalance(float(whole[s]), float(inside[:, s].min()), float(inside[:, s].max()))
        for s in range(shares.shape[1])
    )
    return Balance(tuple(sources), int(lengths.min()), float(lengths.mean()), int(lengths.max()))


# ---- deal -----------------------------------------------------------------------------------------------------------
# Each source is shuffled and laid end to end; range i gets the documents whose middle lies in the i-th of `ranges`
# equal parts. So a range's share of a source is off by at most one document, and documents that are longer than that
# allows are cut. Inside a range all sources are shuffled together. Pure; memory: about 60 bytes for each document.


TOLERANCE = 0.02  # of a range's tokens: largest difference between a source's share of a range and of the data set
LEAST_CUT = 256  # tokens: shorter pieces teach little
DOCUMENT = np.dtype([("file", "<u4"), ("tokens", "<u4"), ("start", "<u8")])  # 16 bytes, as in documents.npy
MOST_TOKENS = (1 << 32) - 1  # of a document: what DOCUMENT holds


@dataclass(frozen=True)
class Documents:
    """The positions of one source's documents: arrays of equal length."""

    file: I64  # index of the token file
    start: I64  # its first token there
    tokens: I64  # its length

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Dealt:
    """The documents of all sources in the order of their ranges."""

    documents: np.ndarray  # DOCUMENT[n]
    source: I64  # index of each document's source
    bounds: I64  # [ranges + 1]: range i has documents[bounds[i] : bounds[i + 1]]
    shares: I64  # [ranges, sources] tokens


def cut_of(tokens: int, ranges: int, tolerance: float) -> int:
    """Return the longest document, in tokens, with which no range's shares are off by more than `tolerance`."""
    return max(LEAST_CUT, int(tolerance * tokens / ranges))


def deal_documents(sources: Sequence[Documents], ranges: int, seed: int, cut: int = 0) -> Dealt:
    """Deal the documents of each source into `ranges` ranges.

    cut     longer documents are cut into pieces of at most this many tokens; 0: none is cut
    Errors  ConfigError if a source is empty, there are fewer tokens than ranges, or DOCUMENT holds no length of a piece
    """
    sizes = [int(source.tokens.sum()) for source in sources]
    if 0 in sizes:
        raise ConfigError(f"source number {sizes.index(0) + 1} has no token")
    if not 1 <= ranges <= sum(sizes):
        raise ConfigError(f"ranges: expected 1 to {sum(sizes)}, as many as there are tokens, got {ranges}")
    pieces = [_cut_documents(source, cut) if cut else source for source in sources]
    if (longest := max(int(source.tokens.max()) for source in pieces)) > MOST_TOKENS:
        raise ConfigError(f"a document of {longest} tokens: expected at most {MOST_TOKENS}; cut it (--cut)")
    homes = []
    for index, source in enumerate(pieces):
        homes.append(_assign_ranges(source.tokens, ranges, shuffle_numbers(len(source), seed, index)))
    count = [len(source) for source in pieces]
    home, source_of = np.concatenate(homes), np.repeat(np.arange(len(pieces)), count)
    mixed = shuffle_numbers(len(home), seed, len(pieces))  # then sorted by range, so that sources are mixed inside each
    order = mixed[np.argsort(home[mixed], kind="stable")]
    documents = np.empty(len(home), DOCUMENT)
    for field in ("file", "tokens", "start"):
        documents[field] = np.concatenate([getattr(source, field) for source in pieces])[order]
    bounds = np.searchsorted(home[order], np.arange(ranges + 1)).astype(np.int64)
    shares = np.zeros((ranges, len(pieces)), np.int64)
    np.add.at(shares, (home[order], source_of[order]), documents["tokens"].astype(np.int64))
    return Dealt(documents, source_of[order], bounds, shares)


def deal_rows(count: int, ranges: int, seed: int, sources: Sequence[object] | None = None) -> list[I64]:
    """Deal the rows of a table (a Hugging Face data set); return the row numbers of each range.

    sources  source of each row; None: all rows are of one
    """
    names = np.zeros(count, np.int64) if sources is None else np.unique(np.asarray(sources), return_inverse=True)[1]
    if len(names) != count:
        raise ConfigError(f"sources: expected one for each of {count} rows, got {len(names)}")
    rows = [np.flatnonzero(names == source) for source in np.unique(names)]
    documents = [Documents(np.zeros_like(r), r, np.ones_like(r)) for r in rows]
    dealt = deal_documents(documents, ranges, seed)
    starts = dealt.documents["start"].astype(np.int64)
    return [starts[a:b] for a, b in zip(dealt.bounds, dealt.bounds[1:], strict=False)]


def _assign_ranges(tokens: I64, ranges: int, order: I64) -> I64:
    """Return the range of each document.

    The documents of a source are laid end to end in `order` and cut into ranges of equal length; a document goes to the
    range in which its middle lies.
    """
    laid = tokens[order]
    middles = np.cumsum(laid) - (laid + 1) // 2
    homes = np.empty(len(tokens), np.int64)
    homes[order] = np.minimum((middles.astype(np.float64) / laid.sum() * ranges).astype(np.int64), ranges - 1)
    return homes


def _cut_documents(source: Documents, cut: int) -> Documents:
    """Return pieces of at most `cut` tokens, nearly equal within a document."""
    parts = -(-source.tokens // cut)
    which = np.repeat(np.arange(len(source)), parts)
    place = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece in its document
    tokens, of = source.tokens[which], parts[which]
    begin, end = tokens * place // of, tokens * (place + 1) // of
    return Documents(source.file[which], source.start[which] + begin, end - begin)
