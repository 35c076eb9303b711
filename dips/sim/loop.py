"""The event loop of one simulated process: its clock is the world's heap, and no callback runs while it is stopped.

The shipped daemons run on it: tasks, timeouts and `run_in_executor` work as on asyncio's own loop. There are no
sockets, signals or subprocesses; what arrives from elsewhere is passed in by `deliver`.

Must stay true: ready callbacks run in the order in which they became ready, as asyncio promises. The seed draws when
they run: mostly at once, sometimes a little later, so that several arrivals are found together.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from random import Random
from typing import Any, TypeVar, TypeVarTuple

from dips.errors import StaleTerm
from dips.sim.heap import Heap, Timer

LATE_SHARE = 0.1  # arrivals that find the process waiting for a core
LATE_S = 0.005  # longest wait for a core

T = TypeVar("T")
_Ts = TypeVarTuple("_Ts")
WorkTime = Callable[[Any], float]  # submitted function → seconds that a thread spends on it


class _Due(asyncio.TimerHandle):
    """A planned callback, with its place in the heap."""

    timer: Timer


class SimLoop(asyncio.BaseEventLoop):
    """Runs the tasks of one process until it is killed; errors that nobody handles end the simulation."""

    def __init__(self, heap: Heap, rng: Random, process: str, work_time: WorkTime) -> None:
        """`work_time` draws how long a function that is passed to a thread takes; its effect happens at the end."""
        super().__init__()
        self._heap, self._rng, self._process, self._work_time = heap, rng, process, work_time
        self._ready: deque[asyncio.Handle] = deque()
        self._arrived: deque[asyncio.Handle] = deque()  # what becomes ready with the next turn
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._turning = self._turn_planned = False
        self._error: BaseException | None = None
        self.stopped = False  # by SIGSTOP, or with its machine
        self.dead = False

    # ---- for the world ---------------------------------------------------------------------------------------------

    def deliver(self, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback` in the process: something has arrived from elsewhere, or a thread has ended its work."""
        if self.dead:
            return
        self._arrived.append(asyncio.Handle(callback, args, self))
        if not (self._turning or self._turn_planned or self.stopped):
            if self._rng.random() < LATE_SHARE:
                self._plan_turn(LATE_S * self._rng.random())
            else:
                self._turn()

    def stop_process(self) -> None:
        """Stop the process by SIGSTOP: arrivals and due timers wait."""
        self.stopped = True

    def continue_process(self) -> None:
        """Continue the process: it finds what became ready meanwhile."""
        self.stopped = False
        self._turn()

    def kill(self) -> None:
        """End the process as by SIGKILL: what its tasks do as they are cancelled must reach nobody, as it is dead."""
        self._arrived.clear()
        for task in list(self._tasks):
            task.cancel()
        self._run_ready()
        self.dead = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the running loop, for what is built or closed outside a turn."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            yield
        finally:
            events._set_running_loop(before)

    def fail(self, error: BaseException) -> None:
        """End the simulation with this error of the process, after the present callback."""
        if self._error is None:
            self._error = error

    # ---- turns -----------------------------------------------------------------------------------------------------

    def _plan_turn(self, delay_s: float) -> None:
        self._turn_planned = True
        self._heap.call_later(delay_s, self._process, self._turn)

    def _turn(self) -> None:
        """Run all that is ready, and what becomes ready thereby."""
        self._turn_planned = False
        if self.dead or self.stopped:
            return
        self._run_ready()
        if self._error is not None:
            raise self._error

    def _run_ready(self) -> None:
        ready, arrived, before = self._ready, self._arrived, events._get_running_loop()
        self._turning = True
        events._set_running_loop(self)
        try:
            while ready or arrived:
                if arrived:
                    ready.extend(arrived)
                    arrived.clear()
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            events._set_running_loop(before)
            self._turning = False

    # ---- for asyncio -----------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._heap.now

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:
            self._ready.append(handle)
            if not (self._turning or self._turn_planned):
                self._plan_turn(0.0)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _Due(when, callback, args, self, context)
        handle.timer = self._heap.call_at(when, self._process, partial(self._on_due, handle))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._heap.now + delay, callback, *args, context=context)

    def _on_due(self, handle: _Due) -> None:
        if not self.dead:
            self._arrived.append(handle)
            if not self._turn_planned:
                self._turn()

    def _timer_handle_cancelled(self, handle: _Due) -> None:
        handle.timer.cancel()

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)
        self._tasks[task] = None
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def run_in_executor(self, executor: Any, func: Callable[[*_Ts], T], *args: *_Ts) -> asyncio.Future[T]:
        """Run `func` when the time that a thread needs for it has passed, unless the process is dead by then."""
        done: asyncio.Future[T] = self.create_future()
        work = partial(func, *args)
        self._heap.call_later(self._work_time(work), f"{self._process} works", partial(self._end_work, work, done))
        return done

    def _end_work(self, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        if self.dead:
            return
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 (it is raised where the work is awaited)
            self.deliver(_set_exception, done, error)
        else:
            self.deliver(_set_result, done, result)

    def is_closed(self) -> bool:
        return self.dead

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the simulation: nobody handles this error in the process."""
        if not self.dead:
            self.fail(context.get("exception") or RuntimeError(context["message"]))


def _set_result(done: asyncio.Future[Any], result: Any) -> None:
    if not done.done():
        done.set_result(result)


def _set_exception(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


class SimLog:
    """The log and timeline of a simulated process: nothing is kept, and a bug that it reports ends the simulation."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail

    def record_mark(self, kind: str, **fields: Any) -> None: ...
    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None: ...

    def error(self, event: str, exc_info: BaseException | None = None, **fields: Any) -> None:
        """End the simulation if there is an exception: but for disks and successors, the process handles all others."""
        if exc_info is not None and not isinstance(exc_info, OSError | StaleTerm):
            self._fail(exc_info)

    critical = error
