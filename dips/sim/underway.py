"""A simulated transfer of all ranks, as the trainer sees it: it waits for its end, or looks at it now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dips.client.ipc.messages import PullNow, PushNow
from dips.sim.fiber import ChangeSignal, Wait
from dips.sim.heap import Heap
from dips.sim.streams import SimTransfer

# Begins a transfer; its argument is called with what came of it.
Start = Callable[[Callable[[object], None]], SimTransfer]


class SimBackgroundTransfer:
    """A push or pull that `verdict` ordered. `result` is falsy if it broke or was ended."""

    def __init__(self, heap: Heap, verdict: PushNow | PullNow, start: Start, diverged: bool = False) -> None:
        """`diverged`: the model is not finite, so what is started moves nothing, and is over."""
        self._heap, self.verdict = heap, verdict
        self.diverged = self.over = diverged
        self.result: Any = None
        self._changed = ChangeSignal(heap)
        self._steps = 0  # inner steps taken beside it
        self.moving = start(self._on_end)
        self.meter = self.moving.meter

    def _on_end(self, result: object) -> None:
        self.over, self.result = True, result
        self._changed.wake_waiters()

    def on_inner_step(self) -> None:
        """Open the fragments that are due."""
        self._steps += 1
        moving, interval = self.moving, max(1, self.verdict.interval)  # simulated rounds are short
        while not self.over and moving.open < moving.fragments and self._steps >= moving.open * interval:
            moving.open_next()

    def open_all(self) -> None:
        """Training is paused: nothing is gained by staggering."""
        while not self.over and self.moving.open < self.moving.fragments:
            self.moving.open_next()

    def halt_transfer(self) -> None:
        """It leads nowhere: nothing more is sent or received."""
        self.moving.cancel()
        self.meter.ended = self._heap.now
        self.over = True

    def next_change(self, at_most_s: float, what: str) -> Wait:
        """Wait for its end, or so long."""
        return self._changed.wait_for_change(at_most_s, what)
