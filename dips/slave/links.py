"""Bytes by cluster: what moved from and to each, in a bounded number of names. Its owner serialises the calls."""

from __future__ import annotations

from collections import Counter

MOST_CLUSTERS = 1000  # counted by name; those that come after them are counted together
OTHERS = "others"


class ByCluster:
    """Counts bytes since the start of the process."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def add(self, cluster: str, nbytes: int) -> None:
        known = cluster in self._bytes or len(self._bytes) < MOST_CLUSTERS
        self._bytes[cluster if known else OTHERS] += nbytes

    def told(self) -> dict[str, int]:
        return dict(self._bytes)
