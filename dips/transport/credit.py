"""The bytes that one stream may have in flight: 2 × bandwidth × round trip, in [4, 64] MiB (docs/protocol.md#sockets).

Pure: `now` is an argument. The round trip is measured from a WANT that left when nothing was in flight to its first
chunk; the bandwidth is the best of the last spans, so that one pause of either end does not shrink the credit. While
the credit is the limit, the measured bandwidth is at least credit / round trip, so the credit doubles until the link is
the limit.
"""

from __future__ import annotations

from collections import deque

LEAST_BYTES = 4 << 20
FIRST_BYTES = 16 << 20  # before anything is measured: what a busy core needs to keep a fast link full
MOST_BYTES = 64 << 20
MOST_CHUNKS = 128  # in flight on one stream; RCVHWM is above it
SLICE_S = 0.01  # delay until a busy core reads a socket: a shorter round trip counts as this
SPAN_S = 0.01  # least length of the spans over which bandwidth is measured
SPANS = 8  # last spans, of which the best counts


class Credit:
    """The credit of one stream, from its measured round trip and bandwidth."""

    def __init__(self) -> None:
        self.bytes = FIRST_BYTES
        self._rtt = float("inf")  # smallest measured, s
        self._asked_at: float | None = None  # time of a WANT sent when nothing was in flight
        self._span_at: float | None = None
        self._span_bytes = 0
        self._rates: deque[float] = deque(maxlen=SPANS)  # bytes/s of the last spans

    @property
    def bytes_per_s(self) -> float:
        """Largest bandwidth of the last spans; 0 before the first span is over."""
        return max(self._rates, default=0.0)

    @property
    def latest_bytes_per_s(self) -> float:
        """Bandwidth of the last span; 0 before the first is over."""
        return self._rates[-1] if self._rates else 0.0

    def on_want(self, now: float, idle: bool) -> None:
        """Record that a WANT leaves; `idle` if nothing was in flight."""
        if idle:
            self._asked_at, self._span_at, self._span_bytes = now, now, 0

    def on_chunk(self, nbytes: int, now: float) -> None:
        """Record that a chunk came, and update the credit at the end of a span."""
        if self._asked_at is not None:
            self._rtt = min(self._rtt, max(now - self._asked_at, 1e-6))
            self._asked_at = None
        if self._span_at is None:
            return
        self._span_bytes += nbytes
        span = now - self._span_at
        if span >= max(SPAN_S, self._rtt):
            self._rates.append(self._span_bytes / span)
            wanted = int(2 * max(self._rtt, SLICE_S) * self.bytes_per_s)
            self.bytes = min(max(wanted, LEAST_BYTES), MOST_BYTES)
            self._span_at, self._span_bytes = now, 0
