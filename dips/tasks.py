"""Background tasks that are not awaited, whose failure, which is a bug, is reported at once; work that a silent disk
must not keep from ending; and a task's alarm clock.

asyncio reports a failure only when the task is collected, so a daemon would continue without the task's work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from math import inf
from typing import Any, TypeVar

T = TypeVar("T")
Fail = Callable[[BaseException], None]


def start_task(work: Coroutine[Any, Any, T], fail: Fail, name: str | None = None) -> asyncio.Task[T]:
    """Run `work` on the running loop; if it raises, call `fail` with the exception, to end the process."""
    task = asyncio.get_running_loop().create_task(work, name=name)

    def hear_end(ended: asyncio.Task[T]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            fail(error)

    task.add_done_callback(hear_end)
    return task


def call_apart(work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` on a daemon thread: a disk or a store that hangs must hold up neither the caller nor its end."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from here on nobody cancels it

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 (raised where the result is awaited)
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class SpacedLooks:
    """Looks at files now and then, apart: a disk may be silent, and an event loop may ask. For one caller at a time."""

    def __init__(
        self,
        look: Callable[[], None],
        name: str,
        every_s: float,
        patience_s: float,
        clock: Callable[[], float],
        call: Callable[[Callable[[], None], str], Future[None]] = call_apart,
    ) -> None:
        """
        every_s     least time between the begins of two looks
        patience_s  how long one is waited for, as long as a disk that works may take
        """
        self._look, self._name, self._every_s, self._patience_s = look, name, every_s, patience_s
        self._clock, self._call = clock, call
        self._looked = clock()
        self._under_way: Future[None] | None = None  # the one that has not ended, or not been heard

    def look_if_due(self) -> None:
        """Look, if none is under way; raise what a look has raised, however late."""
        now = self._clock()
        if now - self._looked >= self._every_s and self._under_way is None:
            self._looked, self._under_way = now, self._call(self._look, self._name)
            wait([self._under_way], self._patience_s)
        if self._under_way is not None and self._under_way.done():
            ended, self._under_way = self._under_way, None
            ended.result()


class Alarm:
    """Wakes the one task that waits for it: as soon as it is rung, or at a time.

    That time moves with nearly every event of a daemon, mostly to later; a timer is made only where it moves to
    earlier. So a wait may end before its time, and whoever waited looks at the clock again.
    """

    def __init__(self) -> None:
        self._rung = False
        self._waiting: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # the next one

    def ring(self) -> None:
        """End the present wait, or the next one at once."""
        self._rung = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self, at_most_s: float) -> None:
        """Return when it is rung, or in `at_most_s` seconds, or earlier; inf: no time is set."""
        if not self._rung:
            loop = asyncio.get_running_loop()
            until = loop.time() + at_most_s
            if until < inf and (self._timer is None or until < self._timer.when()):
                self._stop_timer()
                self._timer = loop.call_at(until, self._on_time)
            self._waiting = loop.create_future()
            try:
                await self._waiting
            except asyncio.CancelledError:
                self._stop_timer()
                raise
        self._rung = False

    def _on_time(self) -> None:
        self._timer = None
        self.ring()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
