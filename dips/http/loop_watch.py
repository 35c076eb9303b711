"""Measures whether an event loop answers, and how late it wakes: from within, and from another thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from dips.telemetry.histogram import LAG_S, Histogram

WAKE_S = 0.25  # interval of wake-ups
T = TypeVar("T")


class LoopWatch:
    """Watches the loop on which it is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.lag = Histogram(LAG_S)
        self._task = self._loop.create_task(self._watch(), name="loop watch")

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + WAKE_S
            await asyncio.sleep(WAKE_S)
            self.lag.observe_value(max(0.0, time.monotonic() - due))

    def call_on_loop(self, ask: Callable[[], T]) -> Future[T]:
        """Have the loop call `ask`; from another thread. It is not called if the future was cancelled before."""
        answer: Future[T] = Future()

        def call() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(ask())
                except Exception as error:  # noqa: BLE001 (any exception is returned to the caller)
                    answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            answer.set_exception(TimeoutError("the event loop has ended"))
        return answer

    async def stop_watching(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def wait_for_answer(answer: Future[T], within_s: float) -> T:
    """Await, on any loop, the answer of another loop; raise TimeoutError if it does not come in time."""
    waiting: Awaitable[Any] = asyncio.wrap_future(answer)
    async with asyncio.timeout(within_s):
        result: T = await waiting
    return result
