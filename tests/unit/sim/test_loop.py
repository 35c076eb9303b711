"""The event loop of a simulated process: its time is the heap's; it waits while the process is stopped, and ends with
it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random
from typing import Any

import pytest

from dips.sim.heap import Heap
from dips.sim.loop import SimExecutor, SimLog, SimLoop
from dips.tasks import start_task

WORK_S = 2.0


class PlayedProcess:
    """A process on its own heap, and a log of what it does, each with its time."""

    def __init__(self, seed: int = 0) -> None:
        self.heap = Heap()
        self.loop = SimLoop(self.heap, Random(seed), "a process", lambda *args: WORK_S)
        self.did: list[tuple[float, Any]] = []

    def start(self, work: Any) -> asyncio.Task[Any]:
        return self.loop.create_task(work)

    def note(self, what: Any) -> None:
        self.did.append((self.heap.now, what))

    def play(self) -> None:
        try:
            while (timer := self.heap.next_event()) is not None:
                timer.action()
        finally:
            self.loop.kill()


def test_tasks_wait_in_the_time_of_the_heap() -> None:
    """Sleep, timeout and event cost no real time, and end at the time that they name."""

    async def work() -> None:
        await asyncio.sleep(30.0)
        process.note("slept")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        process.note(asyncio.get_running_loop().time())

    process = PlayedProcess()
    process.start(work())
    process.play()
    assert process.did == [(30.0, "slept"), (35.0, 35.0)]


def test_what_is_ready_runs_in_its_order() -> None:
    """As asyncio promises, and whatever the seed: answers in order (transport/ordered_calls.py) rest on it."""
    for seed in range(20):
        process = PlayedProcess(seed)
        for number in range(10):
            process.heap.call_later(0.001 * number, "arrives", partial(process.loop.deliver, process.note, number))
        process.play()
        assert [what for _, what in process.did] == list(range(10))


def test_the_seed_draws_which_arrivals_are_found_together() -> None:
    """Some seeds find two arrivals in one turn, most do not: the same seed does the same."""

    def times_of(seed: int) -> list[float]:
        process = PlayedProcess(seed)
        for number in range(10):
            process.heap.call_later(0.001 * number, "arrives", partial(process.loop.deliver, process.note, number))
        process.play()
        return [at for at, _ in process.did]

    together = [len(set(times_of(seed))) < 10 for seed in range(20)]
    assert any(together) and not all(together)
    assert times_of(3) == times_of(3)


def test_a_stopped_process_finds_everything_when_it_goes_on() -> None:
    """SIGSTOP: no callback runs, and time passes nevertheless."""

    async def work() -> None:
        await asyncio.sleep(1.0)
        process.note("slept")

    process = PlayedProcess()
    process.start(work())
    process.heap.call_later(0.5, "SIGSTOP", process.loop.stop_process)
    process.heap.call_later(2.0, "arrives", lambda: process.loop.deliver(process.note, "arrived"))
    process.heap.call_later(8.0, "SIGCONT", process.loop.continue_process)
    process.play()
    assert process.did == [(8.0, "arrived"), (8.0, "slept")]


def test_work_of_a_thread_has_its_effect_at_its_end() -> None:
    """The loop goes on meanwhile; what the work raises is raised where it is awaited."""

    def fill_disk() -> None:
        process.note("disk")
        raise OSError("full")

    async def work() -> None:
        with pytest.raises(OSError, match="full"):
            await asyncio.get_running_loop().run_in_executor(None, fill_disk)
        process.note(await asyncio.to_thread(lambda: "done"))

    process = PlayedProcess()
    process.start(work())
    process.play()
    assert process.did == [(WORK_S, "disk"), (2 * WORK_S, "done")]


def test_one_thread_does_one_work_after_another() -> None:
    """Work waits for the work before it; what has learned that it is in vain ends at once."""
    process = PlayedProcess()
    thread = SimExecutor(process.loop, lambda seconds: seconds, alone=True)
    for seconds in (5.0, 1.0, 2.0):
        thread.submit(process.note, seconds)
    process.heap.call_later(3.0, "in vain", lambda: thread.end_early(thread.under_way[0]))
    process.play()
    assert process.did == [(3.0, 5.0), (4.0, 1.0), (6.0, 2.0)]
    assert thread.worked_s() == 6.0


def test_a_thread_of_a_stopped_process_waits() -> None:
    """SIGSTOP stops all threads: what is over meanwhile has its effect when the process goes on."""
    process = PlayedProcess()
    SimExecutor(process.loop, lambda what: WORK_S).submit(process.note, "written")
    process.heap.call_later(1.0, "SIGSTOP", process.loop.stop_process)
    process.heap.call_later(8.0, "SIGCONT", process.loop.continue_process)
    process.play()
    assert process.did == [(8.0, "written")]


def test_a_killed_process_does_nothing_more() -> None:
    """Neither its tasks nor its timers nor its threads; what is delivered to it is lost."""

    async def work() -> None:
        await asyncio.to_thread(process.note, "written")
        process.note("went on")

    process = PlayedProcess()
    task = process.start(work())
    process.loop.call_later(3.0, process.note, "timer")
    process.heap.call_later(1.0, "SIGKILL", process.loop.kill)
    process.heap.call_later(2.0, "arrives", lambda: process.loop.deliver(process.note, "arrived"))
    process.play()
    assert process.did == []
    assert task.cancelled()


def test_an_error_that_nobody_handles_ends_the_simulation() -> None:
    """Of a callback, and of a task that was begun to be forgotten."""

    def fail() -> None:
        raise ValueError("of a callback")

    async def work() -> None:
        raise ValueError("of a task")

    process = PlayedProcess()
    process.loop.call_soon(fail)
    with pytest.raises(ValueError, match="of a callback"):
        process.play()

    process = PlayedProcess()
    process.heap.call_later(1.0, "begins", lambda: process.loop.deliver(start_task, work(), process.loop.fail))
    with pytest.raises(ValueError, match="of a task"):
        process.play()


def test_a_bug_that_a_process_logs_ends_the_simulation() -> None:
    """A daemon logs it and ends; a disk that fails, and what is logged without an exception, is its daily life."""
    process = PlayedProcess()
    log = SimLog(process.loop.fail)
    process.loop.call_soon(log.error, "exit")
    process.loop.call_soon(log.critical, "not written", OSError("full"))
    process.loop.call_later(1.0, process.note, "goes on")
    process.loop.call_later(2.0, log.critical, "the coordinator failed", KeyError("push"))
    with pytest.raises(KeyError, match="push"):
        process.play()
    assert process.did == [(1.0, "goes on")]
