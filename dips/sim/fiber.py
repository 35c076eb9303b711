"""Simulated processes: a fiber runs a generator that yields what it waits for, so its code reads from top to bottom.

A killed fiber is never resumed. A fiber behind a closed gate (SIGSTOP) is resumed when the gate opens, with all events
that arrived meanwhile, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from dips.sim.heap import Heap

Resume = Callable[[Any], None]
Wait = Callable[[Resume], None]  # begins to wait; calls its argument once, with the result
Story = Generator[Wait, Any, Any]


class Gate:
    """Passes events to a process, or holds them while the process is stopped."""

    def __init__(self, outer: Gate | None = None) -> None:
        """Create a gate behind `outer`: a process is stopped with its machine, or by itself."""
        self.closed = False
        self._outer = outer
        self._kept: deque[Callable[[], None]] = deque()

    def pass_on(self, action: Callable[[], None]) -> None:
        """Do the action now, or when the gate opens."""
        outer = self._outer
        if outer is not None and (outer.closed or outer._kept or outer._outer is not None):
            outer.pass_on(lambda: self._let_in(action))
        elif self.closed or self._kept:
            self._kept.append(action)
        else:
            action()

    def _let_in(self, action: Callable[[], None]) -> None:
        if self.closed or self._kept:
            self._kept.append(action)
        else:
            action()

    def close(self) -> None:
        self.closed = True

    def open(self) -> None:
        """Do all held actions now; an action that closes the gate again keeps the rest."""
        self.closed = False
        while self._kept and not self.closed:
            self._kept.popleft()()


class Fiber:
    """Runs a generator until it ends or is killed."""

    def __init__(self, story: Story, gate: Gate | None = None) -> None:
        self._story: Story | None = story
        self._gate = gate
        self._run_story(None)

    def kill(self) -> None:
        """Stop the fiber for good. A generator that kills its own fiber ends at its next wait."""
        self._story = None

    def _resume_story(self, value: Any) -> None:
        if self._gate is None:
            self._run_story(value)
        else:
            self._gate.pass_on(partial(self._run_story, value))

    def _run_story(self, value: Any) -> None:
        story = self._story
        if story is None:
            return
        try:
            wait = story.send(value)
        except StopIteration:
            self._story = None
            return
        if self._story is not None:
            wait(self._resume_story)


def sleep(heap: Heap, seconds: float, what: str) -> Wait:
    """Wait for simulated time to pass."""

    def begin_wait(resume: Resume) -> None:
        heap.call_later(seconds, what, lambda: resume(None))

    return begin_wait


class ChangeSignal:
    """Wakes all fibers that wait for a change; each waits for a limited time."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._waiting: list[Resume] = []

    @property
    def awaited(self) -> bool:
        return bool(self._waiting)

    def wait_for_change(self, at_most_s: float, what: str) -> Wait:
        """Wait until something changes, at most `at_most_s`."""

        def begin_wait(resume: Resume) -> None:
            timer = self._heap.call_later(at_most_s, what, lambda: end_wait(None))

            def end_wait(value: Any) -> None:
                if end_wait in self._waiting:
                    self._waiting.remove(end_wait)
                    timer.cancel()
                    resume(value)

            self._waiting.append(end_wait)

        return begin_wait

    def wake_waiters(self) -> None:
        for end_wait in list(self._waiting):
            end_wait(None)
