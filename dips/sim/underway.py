"""A simulated transfer of all ranks, as the trainer sees it: it is waited for, or polled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dips.client.ipc.messages import PullNow, PushNow
from dips.sim.fiber import ChangeSignal, Wait
from dips.sim.heap import Heap
from dips.sim.streams import SimTransfer

# Begins a transfer; its argument is called with the result.
Start = Callable[[Callable[[object], None]], SimTransfer]


class SimBackgroundTransfer:
    """A push or pull ordered by `verdict`. `result` is falsy if it broke or was halted."""

    def __init__(self, heap: Heap, verdict: PushNow | PullNow, start: Start, diverged: bool = False) -> None:
        """Start the transfer; `diverged`: the model is not finite, so nothing moves and it is over at once."""
        self._heap, self.verdict = heap, verdict
        self.diverged = self.over = diverged
        self.result: Any = None
        self._changed = ChangeSignal(heap)
        self._steps = 0  # inner steps taken since its start
        self.moving = start(self._on_end)
        self.meter = self.moving.meter

    def _on_end(self, result: object) -> None:
        self.over, self.result = True, result
        self._changed.wake_waiters()

    def on_inner_step(self) -> None:
        """Open the fragments that are due after an inner step."""
        self._steps += 1
        moving, interval = self.moving, max(1, self.verdict.interval)  # simulated rounds are short
        while not self.over and moving.open < moving.fragments and self._steps >= moving.open * interval:
            moving.open_next()

    def open_all(self) -> None:
        """Open all fragments, since training is paused and staggering has no benefit."""
        while not self.over and self.moving.open < self.moving.fragments:
            self.moving.open_next()

    def halt_transfer(self) -> None:
        """End the transfer: nothing more is sent or received."""
        self.moving.cancel()
        self.meter.ended = self._heap.now
        self.over = True

    def next_change(self, at_most_s: float, what: str) -> Wait:
        """Wait for the transfer's end, at most `at_most_s`."""
        return self._changed.wait_for_change(at_most_s, what)
