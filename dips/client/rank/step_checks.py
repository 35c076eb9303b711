"""Says, once each, what a training script seems to have got wrong: nothing fails by it, and the run suffers."""

from __future__ import annotations

import warnings

from dips.client.rank.collectives import JobCollectives

STEPS_SEEN = 16  # calls of `step` before they are compared with the optimizer's

PER_MICRO_BATCH = (
    "OuterLoop.step was called {calls} times in {steps} optimizer steps: call it once after each optimizer.step(), "
    "with the tokens of all its micro-batches"
)


class StepChecks:
    """One rank's calls of `step`; rank 0 warns."""

    def __init__(self, collectives: JobCollectives) -> None:
        self._collectives = collectives
        self._calls = 0

    def on_step(self, optimizer_steps: int) -> None:
        """One call; `optimizer_steps` since the loop was made, 0 if they are not seen."""
        self._calls += 1
        if self._calls == STEPS_SEEN and 0 < 2 * optimizer_steps <= self._calls:
            self._warn(PER_MICRO_BATCH.format(calls=self._calls, steps=optimizer_steps))

    def _warn(self, text: str) -> None:
        if self._collectives.rank == 0:
            warnings.warn(text, stacklevel=4)
