"""The present rate of a transfer: bytes over the last seconds. Pure: `now` is an argument."""

from __future__ import annotations

from collections import deque

STEP_S = 0.2  # least time between two samples
HORIZON_S = 5.0  # length of the window


class Rate:
    """The rate of one transfer, from samples of its byte count."""

    def __init__(self, now: float, nbytes: int = 0) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, nbytes)])

    def record_bytes(self, nbytes: int, now: float) -> None:
        """Record the total so far. Samples closer than STEP_S replace the previous one."""
        if len(self._samples) > 1 and now - self._samples[-2][0] < STEP_S:
            self._samples.pop()
        self._samples.append((now, nbytes))
        while now - self._samples[1][0] >= HORIZON_S:  # the last is of now
            self._samples.popleft()

    @property
    def bytes_per_s(self) -> float:
        """Mean over the samples of the last HORIZON_S; 0 before the second."""
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return (last - first) / (ended - began) if ended > began else 0.0
