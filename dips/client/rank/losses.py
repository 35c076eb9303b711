"""The losses of a job whose rank 0 computes none: in a pipeline only the last stage has a loss.

Every rank adds up its losses between two polls of the agent; at a poll the ranks gather the sums, and rank 0 reports
those of the first rank that has any. Rank 0's own losses are reported with each step already.
"""

from __future__ import annotations

import json
import math
from typing import Any

from dips.client.rank.collectives import JobCollectives


class LossChannel:
    """One rank's losses since the last poll."""

    def __init__(self, collectives: JobCollectives) -> None:
        self._collectives = collectives
        self._reset_sum()

    def _reset_sum(self) -> None:
        self._sum, self._count, self._finite = 0.0, 0, True

    def add_loss(self, loss: float | None, finite: bool) -> None:
        """Count one inner step; `loss` is None if the script passed none, or one that is not finite."""
        self._finite &= finite
        if loss is not None:
            self._sum, self._count = self._sum + loss, self._count + 1

    def gather_losses(self) -> tuple[float, int, bool] | None:
        """Return sum, count and finiteness of the losses of the first rank that has any; None if that is rank 0, or
        none has.

        Collective; resets the sums on every rank.
        """
        gathered = self._collectives.all_gather(json.dumps([self._sum, self._count, self._finite]).encode())
        self._reset_sum()
        for rank, (total, count, finite) in enumerate(map(json.loads, gathered)):
            if count or not finite:
                return (total, count, finite) if rank else None
        return None


def finite_or_none(loss: Any) -> float | None:
    """Return the loss as a float; None if it is missing or not finite, which the penalty's gate handles."""
    number = loss.detach() if hasattr(loss, "detach") else loss  # torch warns if it requires a gradient
    value = math.nan if number is None else float(number)
    return value if math.isfinite(value) else None
