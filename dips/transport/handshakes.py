"""Counts connections that ended before their first call, which gRPC does not report.

gRPC requests our certificate once for each connection, before its handshake; a connection whose handshake succeeds
makes a call at once (ours connect for a call). So one that began and made none was plain text, garbage, half-open, or
had a certificate that is not of this run.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from dips.telemetry.refusals import count_refusal

PATIENCE_S = 10.0  # from a handshake's begin to the first call; twice what a handshake may take
MOST_PEERS = 8_192  # connections that have made a call and are remembered
MOST_BEGUN = 65_536  # handshakes that are waited for


class HandshakeWatch:
    """The handshakes of one server; from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._begun: deque[float] = deque(maxlen=MOST_BEGUN)
        self._peers: OrderedDict[str, None] = OrderedDict()

    def on_handshake(self) -> None:
        """Record that a connection came in."""
        with self._lock:
            self._count_overdue()
            self._begun.append(self._clock())

    def on_call(self, peer: str) -> None:
        """Record a call over the connection with this name."""
        with self._lock:
            self._count_overdue()
            if peer in self._peers:
                return
            self._peers[peer] = None
            if len(self._peers) > MOST_PEERS:
                self._peers.popitem(last=False)
            if self._begun:
                self._begun.pop()  # the newest: honest ones do not wait

    def _count_overdue(self) -> None:
        while self._begun and self._clock() - self._begun[0] >= PATIENCE_S:
            self._begun.popleft()
            count_refusal("handshake")
