"""Tasks that nobody awaits: how their ends are heard. An alarm: when it wakes, and how many timers that takes."""

from __future__ import annotations

import asyncio
import threading
from math import inf
from random import Random

import pytest

from dips.sim.heap import Action, Heap, Timer
from dips.sim.loop import SimLoop
from dips.tasks import Alarm, call_apart, start_task


async def test_what_fails_is_heard_and_what_ends_or_is_cancelled_is_not() -> None:
    """`fail` gets the error itself, once, as soon as the task is over."""
    heard = list[BaseException]()

    async def work(error: Exception | None) -> None:
        if error is not None:
            raise error

    broken = OSError("the disk is full")
    ended = [start_task(work(error), heard.append) for error in (None, broken)]
    cancelled = start_task(asyncio.sleep(60), heard.append)
    cancelled.cancel()
    await asyncio.wait([*ended, cancelled])
    await asyncio.sleep(0)
    assert heard == [broken]


class CountingHeap(Heap):
    """Counts what is planned by a process, also where it is cancelled later."""

    planned = 0

    def call_at(self, at: float, what: str, action: Action) -> Timer:
        self.planned += what == "sleeper"
        return super().call_at(at, what, action)


class Sleeper:
    """Waits for an alarm again and again, each time as told, on a loop of simulated time."""

    def __init__(self, waits: list[float]) -> None:
        self.heap, self.woken = CountingHeap(), list[float]()
        self.loop = SimLoop(self.heap, Random(1), "sleeper")
        with self.loop.running():
            self.alarm = Alarm()
            self.task = self.loop.create_task(self._sleep(waits))

    async def _sleep(self, waits: list[float]) -> None:
        for seconds in waits:
            await self.alarm.wait(seconds)
            self.woken.append(self.heap.now)

    def play(self, rings: list[float]) -> None:
        for at in rings:
            self.heap.call_at(at, "ring", lambda: self.loop.deliver(self.alarm.ring))
        while (timer := self.heap.next_event()) is not None:
            timer.action()
        self.loop.kill()


def test_an_alarm_wakes_at_its_time_or_when_it_is_rung() -> None:
    """Rung at 1 s; at its time, 2 s later; rung where no time was set, and once more before the wait begins."""
    sleeper = Sleeper([5.0, 2.0, inf, inf])
    sleeper.alarm.ring()
    sleeper.play([1.0, 9.0])
    assert sleeper.woken[0] == 0.0 and sleeper.woken[-1] >= 9.0 and sleeper.task.done()
    alone = Sleeper([3.0, 4.0])
    alone.play([])
    assert alone.woken == [3.0, 7.0]


def test_an_alarm_whose_time_moves_to_later_needs_no_new_timer() -> None:
    """Rung each second for a minute, with 10 s to wait each time: six timers that end early, not sixty."""
    sleeper = Sleeper([10.0] * 70)
    sleeper.play([float(second) for second in range(1, 61)])
    assert sleeper.woken[-1] >= 70.0 - 0.1 and sleeper.heap.planned < 40


def test_an_alarm_whose_wait_is_cancelled_leaves_no_timer() -> None:
    """A killed process leaves nothing that is due."""
    sleeper = Sleeper([10.0])
    sleeper.heap.call_at(1.0, "cancel", lambda: sleeper.loop.deliver(sleeper.task.cancel))
    sleeper.play([])
    assert sleeper.task.cancelled() and sleeper.heap.now < 10.0


async def test_an_error_of_work_apart_is_raised_where_it_is_awaited() -> None:
    """A standby whose look fails ends with it, and does not wait for ever."""

    def fail() -> None:
        raise PermissionError("ledger.sqlite")

    with pytest.raises(PermissionError, match=r"ledger\.sqlite"):
        await asyncio.wait_for(asyncio.wrap_future(call_apart(fail, "look")), 10.0)


async def test_work_apart_goes_on_where_nobody_awaits_it_any_more() -> None:
    """It ends without an error of its own: whoever waited is cancelled, and the disk answers later."""
    answers, done = threading.Event(), threading.Event()
    work = call_apart(lambda: (answers.wait(10.0), done.set()), "look")
    waiting = asyncio.wrap_future(work)
    waiting.cancel()
    answers.set()
    assert work.result(10.0) and done.is_set()
