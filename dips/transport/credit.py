"""How much one stream may have in flight: 2 × bandwidth × round trip, in [4, 64] MiB (protocol.md section 3).

Pure: `now` is an argument. While the credit is what limits, the bandwidth seen is credit / round trip, so the credit
doubles with each round trip until the link limits.
"""

from __future__ import annotations

LEAST_BYTES = 4 << 20
MOST_BYTES = 64 << 20
MOST_CHUNKS = 128  # in flight on one stream; RCVHWM lies above it
_SPAN_S = 0.1  # bandwidth is measured over spans at least so long


class Credit:
    """The measure of one stream."""

    def __init__(self) -> None:
        self.bytes = LEAST_BYTES
        self._rtt = float("inf")  # smallest seen, s
        self._asked_at: float | None = None  # of a WANT sent when nothing was in flight
        self._span_at: float | None = None
        self._span_bytes = 0

    def asked(self, now: float, idle: bool) -> None:
        """A WANT leaves; `idle` if nothing was in flight."""
        if idle:
            self._asked_at, self._span_at, self._span_bytes = now, now, 0

    def arrived(self, nbytes: int, now: float) -> None:
        """A chunk came."""
        if self._asked_at is not None:
            self._rtt = min(self._rtt, max(now - self._asked_at, 1e-6))
            self._asked_at = None
        if self._span_at is None:
            return
        self._span_bytes += nbytes
        span = now - self._span_at
        if span >= max(_SPAN_S, self._rtt):
            wanted = int(2 * self._rtt * self._span_bytes / span)
            self.bytes = min(max(wanted, LEAST_BYTES), MOST_BYTES)
            self._span_at, self._span_bytes = now, 0
