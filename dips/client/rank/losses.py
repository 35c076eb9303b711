"""The losses of a job whose rank 0 computes none: in a pipeline only the last stage has one.

Every rank keeps what its script said since the last look; there the first rank that has any is heard by all, and rank 0
passes it on. What rank 0 itself said is told with each step already.
"""

from __future__ import annotations

import json
import math
from typing import Any

from dips.client.rank.collectives import JobCollectives


class LossChannel:
    """One rank's, between two looks."""

    def __init__(self, voice: JobCollectives) -> None:
        self._voice = voice
        self._begin()

    def _begin(self) -> None:
        self._sum, self._count, self._finite = 0.0, 0, True

    def add(self, loss: float | None, finite: bool) -> None:
        """One inner step is done; `loss` is None if it was not said, or is not finite."""
        self._finite &= finite
        if loss is not None:
            self._sum, self._count = self._sum + loss, self._count + 1

    def heard(self) -> tuple[float, int, bool] | None:
        """Return sum, number and finiteness of the losses of the first rank that has any, None if that is rank 0.

        Collective; begins anew.
        """
        said = self._voice.gather(json.dumps([self._sum, self._count, self._finite]).encode())
        self._begin()
        for rank, (total, count, finite) in enumerate(map(json.loads, said)):
            if count or not finite:
                return (total, count, finite) if rank else None
        return None


def finite(loss: Any) -> float | None:
    """A loss that can be averaged and shown; one that is not finite is the gate's business, not the ledger's."""
    value = math.nan if loss is None else float(loss)
    return value if math.isfinite(value) else None
