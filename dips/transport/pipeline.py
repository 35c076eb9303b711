"""A stage of a pipeline: one thread that does the heavy part (checksum, copy) of what others bring, in order.

Its queue is as deep as everything that may be outstanding, so `put` never blocks and never fails for honest work.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Stage(Generic[T]):
    """One worker thread and its bounded queue."""

    def __init__(self, name: str, depth: int, work: Callable[[T], None]) -> None:
        """`work` is called for each item on the stage's thread and raises nothing."""
        self._queue: queue.Queue[T | None] = queue.Queue(depth + 1)  # one more: the end
        self._depth = depth
        self._work = work
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> bool:
        """Leave an item; False, at once, if the queue is full."""
        if self._queue.qsize() >= self._depth:
            return False
        self._queue.put_nowait(item)
        return True

    def close(self) -> None:
        """Work off what is there and end; nobody puts any more."""
        if not self._closed.is_set():
            self._closed.set()
            self._queue.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            self._work(item)
