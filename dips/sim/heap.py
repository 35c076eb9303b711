"""Time, randomness and processes of a simulated world: one heap by (time, sequence), a generator for each subsystem.

Must stay true: the same seed gives the same run, on any machine and with any PYTHONHASHSEED; and a subsystem that
begins to draw more numbers affects no other, since each draws from a generator that is seeded by its own name.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from heapq import heappop, heappush
from typing import Any

Action = Callable[[], None]


class Timer:
    """A planned event; cancelled by its owner, or when its owner dies."""

    __slots__ = ("action", "alive", "at", "what")

    def __init__(self, at: float, what: str, action: Action) -> None:
        self.at = at
        self.what = what
        self.action = action
        self.alive = True

    def cancel(self) -> None:
        self.alive = False


class Heap:
    """The planned events in order of time; events of equal time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._sequence = 0
        self._queue: list[tuple[float, int, Timer]] = []

    def call_later(self, delay_s: float, what: str, action: Action) -> Timer:
        """Plan `action`; `what` describes it in the trace."""
        return self.call_at(self.now + delay_s, what, action)

    def call_at(self, at: float, what: str, action: Action) -> Timer:
        """Plan `action` for a time, or for now if that has passed."""
        timer = Timer(at if at > self.now else self.now, what, action)
        self._sequence = sequence = self._sequence + 1
        heappush(self._queue, (timer.at, sequence, timer))
        return timer

    def next_event(self) -> Timer | None:
        """Move the clock to the next event that is not cancelled and return it; None if there is none."""
        queue = self._queue
        while queue:
            at, _, timer = heappop(queue)
            if timer.alive:
                self.now = at
                self.events += 1
                return timer
        return None


class Chance:
    """The random generators of a seed, by name."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._made: dict[str, random.Random] = {}

    def generator_for(self, name: str) -> random.Random:
        """Return the generator that belongs to subsystem `name`."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = random.Random(f"{self.seed}/{name}")
        return made


class Trace:
    """The last events, kept unformatted: only a failing seed prints them."""

    def __init__(self, keep: int = 40) -> None:
        self._lines: deque[Timer | tuple[float, str, tuple[Any, ...]]] = deque(maxlen=keep)
        self.add_event: Callable[[Timer], None] = (
            self._lines.append
        )  # called after each event, so without a method's cost

    def add_line(self, now: float, what: str, *details: Any) -> None:
        self._lines.append((now, what, details))

    def lines(self) -> list[str]:
        kept = ((l.at, l.what, ()) if isinstance(l, Timer) else l for l in self._lines)
        return [f"{at:10.3f}  {' '.join((what, *(str(d) for d in details)))}" for at, what, details in kept]


# ---- fiber -----------------------------------------------------------------------------------------------------------
# A killed fiber is never resumed. A fiber behind a closed gate (SIGSTOP) is resumed when the gate opens, with all
# events that arrived meanwhile, in order.


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
