"""A stage of a pipeline: threads that do the heavy part (checksum, copy) of what others bring.

Its queue is as deep as everything that may be outstanding, so `put_item` never blocks and never fails for honest work.
With no thread the work is done where it is put: on few cores a hop to another thread, with its wake-up and its wait
for the interpreter, costs more than the work that it moves away.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from dips.cgroup import available_cpus

MANY_CORES = 4  # from so many on, a thread of its own finds a core of its own beside the sockets' I/O threads

T = TypeVar("T")


def available_cores() -> int:
    """Cores that this process may use at once."""
    return available_cpus()


def spare_threads(available: int) -> int:
    """How many threads a stage gets that could as well work in place."""
    return 0 if available < MANY_CORES else 1


class Stage(Generic[T]):
    """Some worker threads and their bounded queue."""

    def __init__(self, name: str, depth: int, work: Callable[[T], None], threads: int = 1) -> None:
        """`work` is called once for each item and raises nothing; in order, unless there are several threads."""
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._depth = depth
        self._work = work
        self._threads = [
            threading.Thread(target=self._serve_items, name=f"{name}-{k}", daemon=True) for k in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def in_place(self) -> bool:
        """The work is done by who puts it."""
        return not self._threads

    def put_item(self, item: T) -> bool:
        """Leave an item, or work on it now if there is no thread; False, at once, if the queue is full."""
        if not self._threads:
            self._work(item)
            return True
        if self._queue.qsize() >= self._depth:
            return False
        self._queue.put(item)
        return True

    def close(self) -> None:
        """Work off what is there and end; nobody puts any more. Twice is once."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve_items(self) -> None:
        while (item := self._queue.get()) is not None:
            self._work(item)
