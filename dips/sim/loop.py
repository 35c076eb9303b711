"""The event loop of one simulated process: its clock is the world's heap, and no callback runs while it is stopped.

The shipped daemons run on it: tasks, timeouts and `run_in_executor` work as on asyncio's own loop. There are no
sockets, signals or subprocesses; what arrives from elsewhere is passed in by `deliver`. Threads are SimExecutors.

Must stay true: ready callbacks run in the order in which they became ready, as asyncio promises. The seed draws when
they run: mostly at once, sometimes a little later, so that several arrivals are found together.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import events
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from random import Random
from time import thread_time
from typing import Any, TypeVar, TypeVarTuple

from dips.dataclass import dataclass
from dips.errors import DipsError, StaleTerm
from dips.protocol.effects import Failed
from dips.sim.heap import Heap, Timer

LATE_SHARE = 0.1  # arrivals that find the process waiting for a core
LATE_S = 0.005  # longest wait for a core
TASKS_KEPT = 64
SIGNAL_S = 0.5  # longest time until a process that nothing else wakes finds a signal

T = TypeVar("T")
_Ts = TypeVarTuple("_Ts")
WorkTime = Callable[..., float]  # arguments of a function → seconds that a thread spends on it


class _Ready(asyncio.Handle):
    """A callback that is ready, or has arrived. It runs in the context of the world: no process has one of its own."""

    __slots__ = ()

    def __init__(self, callback: Callable[..., object], args: Sequence[Any]) -> None:
        self._callback, self._args, self._cancelled = callback, args, False

    def cancel(self) -> None:
        self._cancelled = True


class _Due(asyncio.TimerHandle):
    """A planned callback, with its place in the heap."""

    __slots__ = ("timer",)
    timer: Timer

    def __init__(self, when: float, callback: Callable[..., object], args: Sequence[Any]) -> None:
        self._when, self._callback, self._args, self._cancelled = when, callback, args, False

    def cancel(self) -> None:
        self._cancelled = True
        self.timer.alive = False


class SimLoop(asyncio.BaseEventLoop):
    """Runs the tasks of one process until it is killed; errors that nobody handles end the simulation."""

    def __init__(self, heap: Heap, rng: Random, process: str, work_time: WorkTime = lambda *args: 0.0) -> None:
        """`work_time` draws the time of functions that are passed to `run_in_executor` (SimExecutor)."""
        super().__init__()
        self._heap, self._rng, self.process = heap, rng, process
        self.threads = SimExecutor(self, work_time)
        self._ready: deque[asyncio.Handle] = deque()
        self._arrived: deque[asyncio.Handle] = deque()  # what becomes ready with the next turn
        self._behind: list[asyncio.Handle] = []  # what becomes ready behind that
        self._tasks: list[asyncio.Task[Any]] = []  # of which some are over
        self._most_tasks = TASKS_KEPT  # then those that are over are forgotten
        self._turning = self._turn_planned = False
        self.ran_s = 0.0  # of a real core, by its callbacks
        self._error: BaseException | None = None
        self.stopped = False  # by SIGSTOP, or with its machine
        self.dead = False

    # ---- for the world ---------------------------------------------------------------------------------------------

    def deliver(self, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback` in the process: something has arrived from elsewhere, or a thread has ended its work."""
        if self.dead:
            return
        self._arrived.append(_Ready(callback, args))
        if not (self._turning or self._turn_planned or self.stopped):
            if self._rng.random() < LATE_SHARE:
                self._plan_turn(LATE_S * self._rng.random())
            else:
                self._turn()

    def deliver_signal(self, handler: Callable[[], object]) -> None:
        """Run the handler of a signal beside whatever wakes the process next, before it or behind it."""
        if not self.dead:
            beside = self._arrived if self._rng.random() < 0.5 else self._behind
            beside.append(_Ready(self.call_soon, (handler,)))  # as asyncio's own loop does
            self._heap.call_later(SIGNAL_S * self._rng.random(), f"{self.process} finds a signal", self._turn)

    def serve_call(self, serve: Callable[[], Awaitable[Any]], answer: Callable[[Any], None]) -> None:
        """Serve a call that has arrived, as gRPC would; `answer` gets the reply, or an error of ours as Failed."""
        self.deliver(lambda: self.create_task(self._answer_call(serve, answer)))

    async def _answer_call(self, serve: Callable[[], Awaitable[Any]], answer: Callable[[Any], None]) -> None:
        try:
            reply = await serve()
        except DipsError as error:
            reply = Failed(type(error), str(error))
        except Exception as error:  # noqa: BLE001 (it ends the simulation)
            self.fail(error)
            return
        if not self.dead:
            answer(reply)

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
        self._behind.clear()
        for task in self._tasks:
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
        self._heap.call_later(delay_s, self.process, self._turn)

    def _turn(self) -> None:
        """Run all that is ready, and what becomes ready thereby."""
        self._turn_planned = False
        if self.dead or self.stopped:
            return
        self._run_ready()
        if self._error is not None:
            raise self._error

    def _run_ready(self) -> None:
        ready, arrived, behind, before = self._ready, self._arrived, self._behind, events._get_running_loop()
        self._turning, began = True, thread_time()
        events._set_running_loop(self)
        try:
            while ready or arrived or behind:
                if arrived or behind:
                    ready.extend(arrived)
                    ready.extend(behind)
                    arrived.clear()
                    behind.clear()
                handle = ready.popleft()
                if not handle._cancelled:
                    try:
                        handle._callback(*handle._args)  # type: ignore[attr-defined]
                    except (KeyboardInterrupt, SystemExit):
                        raise
                    except BaseException as error:  # noqa: BLE001 (it ends the simulation; of a killed task, nothing)
                        self.fail(error)
        finally:
            events._set_running_loop(before)
            self._turning = False
            self.ran_s += thread_time() - began

    # ---- for asyncio -----------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._heap.now

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Ready(callback, args)
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
        handle = _Due(when, callback, args)
        handle.timer = self._heap.call_at(when, self.process, partial(self._on_due, handle))
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

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)
        self._tasks.append(task)
        if len(self._tasks) > self._most_tasks:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._most_tasks = TASKS_KEPT + 2 * len(self._tasks)
        return task

    def run_in_executor(self, executor: Any, func: Callable[[*_Ts], T], *args: *_Ts) -> asyncio.Future[T]:
        """Run `func` on the threads of this loop, also in the place of a pool of real threads."""
        return asyncio.wrap_future(self.threads.submit(func, *args), loop=self)

    def is_closed(self) -> bool:
        return self.dead

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the simulation: nobody handles this error in the process."""
        if not self.dead:
            self.fail(context.get("exception") or RuntimeError(context["message"]))


@dataclass(eq=False, slots=True)
class SimWork:
    """A function that was passed to a thread."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    done: Future[Any]
    began_at: float = 0.0
    timer: Timer | None = None  # until its time is over

    @property
    def subject(self) -> object:
        """The function's first argument."""
        return self.args[0] if self.args else None


class SimExecutor(Executor):
    """Threads of a simulated process: a function has its effect at the end of its time, if the process runs then."""

    def __init__(self, loop: SimLoop, work_time: WorkTime, alone: bool = False) -> None:
        """`work_time` draws the time of a function from its arguments; `alone`: there is one thread."""
        self._loop, self._work_time, self._alone = loop, work_time, alone
        self.under_way: list[SimWork] = []
        self._waiting: deque[SimWork] = deque()
        self._worked_s = 0.0  # by work that is over
        self.ended: Callable[[], None] = lambda: None  # called at the end of each work

    def worked_s(self, counts: Callable[[SimWork], bool] = lambda work: True) -> float:
        """Return the seconds worked so far; of work under way, those of which `counts` is true."""
        now = self._loop.time()
        return self._worked_s + sum(now - work.began_at for work in self.under_way if counts(work))

    def submit(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        work = SimWork(partial(func, **kwargs) if kwargs else func, args, Future())
        if self._alone and self.under_way:
            self._waiting.append(work)
        else:
            self._begin_work(work)
        return work.done

    def end_early(self, work: SimWork) -> None:
        """End work before its time, since it has learned that it is in vain."""
        if work.timer is not None:
            work.timer.cancel()
        self._end_work(work)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all work, as whoever waits for it finds it."""
        while self.under_way:
            self.end_early(self.under_way[0])

    def _begin_work(self, work: SimWork) -> None:
        self.under_way.append(work)
        heap, loop, work_s = self._loop._heap, self._loop, self._work_time(*work.args)
        work.began_at = heap.now
        if work_s:
            work.timer = heap.call_later(work_s, f"{loop.process} works", partial(loop.deliver, self._end_work, work))
        else:
            loop.deliver(self._end_work, work)

    def _end_work(self, work: SimWork) -> None:
        if work not in self.under_way:
            return  # ended early while its time was over
        try:
            if work.done.set_running_or_notify_cancel():
                work.done.set_result(work.func(*work.args))
        except Exception as error:  # noqa: BLE001 (it is raised where the work is awaited)
            work.done.set_exception(error)
            if not isinstance(error, DipsError | OSError):
                self._loop.fail(error)
        self.under_way.remove(work)
        self._worked_s += self._loop.time() - work.began_at
        self.ended()
        if self._waiting:
            self._begin_work(self._waiting.popleft())


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

    def exception(self, event: str, **fields: Any) -> None:
        """End the simulation with the exception that is being handled."""
        self.error(event, sys.exc_info()[1])
