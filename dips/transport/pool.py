"""Transit: bytes that were asked for and are not yet in their place, over all streams; a sum written at start."""

from __future__ import annotations

import threading

FLOOR_BYTES = 4096  # what the smallest chunk costs: bounds the number of frames, hence every queue


def pool_cost(nbytes: int) -> int:
    """What a chunk of `nbytes` takes from the pool."""
    return max(nbytes, FLOOR_BYTES)


class Transit:
    """A counter with a limit, shared by all lanes; every `take_bytes` that succeeds is followed by one `give_back`."""

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
        """Reserve `nbytes` if they are free."""
        with self._lock:
            if self._used + nbytes > self.limit:
                return False
            self._used += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Return what was taken."""
        with self._lock:
            self._used -= nbytes
            assert self._used >= 0, "more was given back than taken"
