"""Time and randomness of a simulated world: one heap ordered by (time, sequence), and a generator for each subsystem.

Must stay true: the same seed gives the same run, on any machine and with any PYTHONHASHSEED; and a subsystem that
begins to draw more numbers affects no other, since each draws from a generator that is seeded by its own name.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
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
        timer = Timer(self.now + delay_s, what, action)
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
