"""The limit of bytes in transit: asked for and not yet in their place, over all streams; a part of the memory sum at
start.
"""

from __future__ import annotations

import threading

FLOOR_BYTES = 4096  # least cost of a chunk: limits the number of frames, and so every queue


def pool_cost(nbytes: int) -> int:
    """Return the pool's cost of a chunk of `nbytes`."""
    return max(nbytes, FLOOR_BYTES)


class Transit:
    """A counter with a limit, shared by all lanes; every `take_bytes` that succeeds must be followed by one
    `give_back`.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= FLOOR_BYTES
        self.limit = limit
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def most_chunks(self) -> int:
        """The most chunks that can be in transit: the depth of a queue that never overflows."""
        return self.limit // FLOOR_BYTES

    def take_bytes(self, nbytes: int) -> bool:
        """Reserve `nbytes`; return False if that would exceed the limit."""
        with self._lock:
            if self._used + nbytes > self.limit:
                return False
            self._used += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Release reserved bytes."""
        with self._lock:
            self._used -= nbytes
            assert self._used >= 0, "more was given back than taken"
