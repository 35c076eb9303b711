"""Warnings, once each, about likely mistakes in a training script that cause no error but harm the run."""

from __future__ import annotations

import warnings

from dips.client.rank.collectives import JobCollectives

STEPS_SEEN = 16  # calls of `step` before they are compared with the optimizer's steps

PER_MICRO_BATCH = (
    "OuterLoop.step was called {calls} times in {steps} optimizer steps: call it once after each optimizer.step(), "
    "with the tokens of all its micro-batches"
)


class StepChecks:
    """Checks one rank's calls of `step`; rank 0 warns."""

    def __init__(self, collectives: JobCollectives) -> None:
        self._collectives = collectives
        self._calls = 0

    def on_step(self, optimizer_steps: int) -> None:
        """Count one call; `optimizer_steps` since the loop was created, 0 if unknown."""
        self._calls += 1
        if self._calls == STEPS_SEEN and 0 < 2 * optimizer_steps <= self._calls:
            self._warn(PER_MICRO_BATCH.format(calls=self._calls, steps=optimizer_steps))

    def _warn(self, text: str) -> None:
        if self._collectives.rank == 0:
            warnings.warn(text, stacklevel=4)
