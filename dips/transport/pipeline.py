"""A stage of a pipeline: threads that do the heavy part (checksum, copy) of work that other threads queue.

Its queue is as deep as everything that may be outstanding, so `put_item` never blocks and never fails for honest work.
Without threads the work is done in the caller: on few cores a hop to another thread, with its wake-up and its wait for
the interpreter, costs more than the work.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from dips.cgroup import available_cpus

MANY_CORES = 4  # with at least this many, a separate thread finds a free core beside the sockets' I/O threads

T = TypeVar("T")


def available_cores() -> int:
    """Return the number of cores that this process may use at once."""
    return available_cpus()


def spare_threads(available: int) -> int:
    """Return the number of threads of a stage that could as well work in the caller."""
    return 0 if available < MANY_CORES else 1


class Stage(Generic[T]):
    """Worker threads with a bounded queue."""

    def __init__(self, name: str, depth: int, work: Callable[[T], None], threads: int = 1) -> None:
        """`work` is called once for each item and must not raise; in order, unless there are several threads."""
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
        """Whether the caller of `put_item` does the work."""
        return not self._threads

    def put_item(self, item: T) -> bool:
        """Queue an item, or process it now if there is no thread; return False, at once, if the queue is full."""
        if not self._threads:
            self._work(item)
            return True
        if self._queue.qsize() >= self._depth:
            return False
        self._queue.put(item)
        return True

    def close(self) -> None:
        """Drain the queue and stop the threads. No items may be put afterwards. Idempotent."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve_items(self) -> None:
        while (item := self._queue.get()) is not None:
            self._work(item)
