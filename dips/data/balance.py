"""The balance of ranges: the share of each source in every range against its share of the whole data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dips.data.order import I64


@dataclass(frozen=True)
class SourceBalance:
    """Shares of one source, from 0 to 1."""

    share: float  # of the whole data set
    least: float  # in the range with the smallest share
    most: float

    @property
    def deviation(self) -> float:
        """The largest distance between a range's share and the data set's."""
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
