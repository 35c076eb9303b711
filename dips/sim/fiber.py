"""Agents as stories: a fiber is a generator that yields what it waits for, so that its code reads from top to bottom.

A fiber that was killed is never resumed, whatever it waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from dips.sim.heap import Heap

Resume = Callable[[Any], None]
Wait = Callable[[Resume], None]  # begins to wait; calls its argument once, with what was waited for
Story = Generator[Wait, Any, Any]


class Fiber:
    """Runs a story until it ends or is killed."""

    def __init__(self, story: Story) -> None:
        self._story: Story | None = story
        self._go(None)

    def kill(self) -> None:
        """It will not run again. A story that kills itself ends when it next waits."""
        self._story = None

    def _go(self, value: Any) -> None:
        story = self._story
        if story is None:
            return
        try:
            wait = story.send(value)
        except StopIteration:
            self._story = None
            return
        if self._story is not None:
            wait(self._go)


def sleep(heap: Heap, seconds: float, what: str) -> Wait:
    """Wait for simulated time to pass."""

    def begin(resume: Resume) -> None:
        heap.after(seconds, what, lambda: resume(None))

    return begin
