"""A view for many readers that is built at most once a second, however often it is read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

MOST_AGE_S = 1.0

T = TypeVar("T")


class CachedView(Generic[T]):
    """A value that is built by the first reader who finds it old; concurrent readers wait for it. Failures are cached,
    too.
    """

    def __init__(
        self, build: Callable[[], T], most_age_s: float = MOST_AGE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._build, self._most_age_s, self._clock = build, most_age_s, clock
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._built: list[T] = []
        self._failure: Exception | None = None

    def read(self) -> T:
        """Return the value; raise the exception of its build. Blocks while it is built, so not for event loops."""
        with self._lock:
            if self._clock() >= self._until:
                self._build_anew()
            if self._failure is not None:
                raise self._failure
            return self._built[0]

    def _build_anew(self) -> None:
        try:
            self._built, self._failure = [self._build()], None
        except Exception as error:  # noqa: BLE001 (any exception is raised to every reader)
            self._failure = error
        self._until = self._clock() + self._most_age_s
