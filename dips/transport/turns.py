"""Turns of a lane's streams to be asked: deficit round robin in bytes.

At most `concurrent_streams` are asked at once; a turn lasts `quantum` bytes and goes on while no other stream waits, so
the link is never idle for the sake of fairness. Bytes beyond a turn are deducted from the next. A slow stream loses its
turn and does not delay the others: an order of asking, never a barrier (docs/rationale.md#5). Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

QUANTUM_BYTES = 16 << 20  # a few credits: with less, the link would run empty at each change of turn

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """The order of asking of one lane."""

    def __init__(self, concurrent_streams: int, quantum: int = QUANTUM_BYTES) -> None:
        assert min(concurrent_streams, quantum) >= 1
        self._concurrent_streams = concurrent_streams
        self._quantum = quantum
        self._active: dict[K, int] = {}  # stream → bytes that may still be asked for in this turn
        self._waiting: deque[K] = deque()
        self._debt: dict[K, int] = {}

    def enter_line(self, key: K) -> None:
        """Append to the end of the line. Idempotent."""
        if key not in self._active and key not in self._waiting:
            self._waiting.append(key)

    def leave_line(self, key: K) -> None:
        """Remove from the line and end the turn. Idempotent."""
        self._debt.pop(key, None)
        if self._active.pop(key, None) is None and key in self._waiting:
            self._waiting.remove(key)

    def line_up(self, place: Callable[[K], int]) -> None:
        """Sort the waiting ones by their places, once; present turns go on."""
        self._waiting = deque(sorted(self._waiting, key=place))

    def rotate_turns(self, drained: Callable[[K], bool], slow: Callable[[K], bool]) -> tuple[K, ...]:
        """End turns that are over, begin possible ones, and return the streams that may be asked, oldest turn first.

        drained  nothing is in flight: only then is a used-up turn over, so that at most `concurrent_streams` are busy
        slow     it was asked and is silent: it loses its turn to a waiting one
        """
        for key, left in list(self._active.items()):
            if not self._waiting:
                if left <= 0:
                    self._active[key] = left + self._quantum
            elif slow(key) or (left <= 0 and drained(key)):
                del self._active[key]
                self._debt[key] = min(left, 0)
                self._waiting.append(key)
        while self._waiting and len(self._active) < self._concurrent_streams:
            key = self._waiting.popleft()
            self._active[key] = self._quantum + self._debt.pop(key, 0)
        return tuple(self._active)

    @property
    def empty(self) -> bool:
        """Whether no stream has a turn and none waits."""
        return not self._active and not self._waiting

    @property
    def crowded(self) -> bool:
        """Whether some stream waits for a turn."""
        return bool(self._waiting)

    def bytes_left(self, key: K) -> int:
        """Return the bytes that `key` may still be asked for in its turn; 0 or less if none, or if it has no turn."""
        return self._active.get(key, 0)

    def spend_bytes(self, key: K, nbytes: int) -> None:
        """Deduct `nbytes` from the turn of `key`."""
        self._active[key] -= nbytes
