"""Counters of a data flow for metrics: bytes by cluster, for a bounded number of names, refused frames by reason."""

from __future__ import annotations

import threading
from collections import Counter

from dips.telemetry.refusals import count_refusal

MOST_CLUSTERS = 1000  # counted by name; later ones are counted together
OTHERS = "others"


class ByCluster:
    """Bytes by cluster since the start of the process; the owner must serialise calls."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def add_bytes(self, cluster: str, nbytes: int) -> None:
        known = cluster in self._bytes or len(self._bytes) < MOST_CLUSTERS
        self._bytes[cluster if known else OTHERS] += nbytes

    def snapshot(self) -> dict[str, int]:
        return dict(self._bytes)


class FrameCounters:
    """Counts of received bytes and refused frames since the start of the process; any thread of the flow may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._received = ByCluster()
        self.bytes_in = 0

    def add_refused(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1
        count_refusal(f"frame_{reason}")

    def add_received(self, cluster: str, nbytes: int) -> None:
        with self._lock:
            self.bytes_in += nbytes
            self._received.add_bytes(cluster, nbytes)

    def refused_by_reason(self) -> Counter[str]:
        with self._lock:
            return self._refused.copy()

    def received_by_cluster(self) -> dict[str, int]:
        with self._lock:
            return self._received.snapshot()
