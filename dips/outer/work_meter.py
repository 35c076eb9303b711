"""How much a slave has worked through: bytes of kernels and of its disk, counted by their threads.

What lasts minutes is told from what hangs by this number alone: it rises, or it does not.
"""

from __future__ import annotations

import threading


class WorkMeter:
    """Bytes since the start of the process; any thread adds, any thread reads."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Add to the bytes that are worked through."""
        with self._lock:
            self.nbytes += nbytes
