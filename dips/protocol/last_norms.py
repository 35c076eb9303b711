"""The last accepted norms of all clusters, sorted, to compare a cluster's norm with the median of the others'.

Pure. Kept beside the penalty's statistics, so that a median does not visit every cluster.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from dips.protocol.records import PenaltyRow


class LastNorms:
    """The last norm of each cluster with an accepted push; with `warm_only`, of those that have warmed up."""

    def __init__(self, rows: Iterable[PenaltyRow], warm_only: bool = False) -> None:
        self.warm_only = warm_only
        self.ordered = sorted(row.last_norm for row in rows if self._counts(row))

    def replace_row(self, old: PenaltyRow | None, new: PenaltyRow) -> None:
        """Update a cluster's norm after its statistics have changed."""
        if old is not None and self._counts(old):
            del self.ordered[bisect_left(self.ordered, old.last_norm)]
        if self._counts(new):
            insort(self.ordered, new.last_norm)

    def median_without(self, row: PenaltyRow) -> float | None:
        """Return the median of the other clusters' norms; None if there are none."""
        skip = bisect_left(self.ordered, row.last_norm) if self._counts(row) else len(self.ordered)
        count = len(self.ordered) - self._counts(row)
        if not count:
            return None
        low, high = (self.ordered[i + (i >= skip)] for i in ((count - 1) // 2, count // 2))
        return low if count % 2 else (low + high) / 2

    def _counts(self, row: PenaltyRow) -> bool:
        return row.accepted > 0 and row.last_norm > 0 and not (self.warm_only and row.warm_left)
