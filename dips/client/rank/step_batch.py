"""Batches of inner steps that rank 0 has reported and not sent yet: fast steps go to the agent together, as one
message.

A message per step would cost more than the rest of `OuterLoop.step`. So steps are held until FLUSH_S have passed since
the last that was sent; a step that itself took as long is sent at once. Any other message to the agent sends the held
steps first (AgentClient), so that the agent has counted them when it answers. If a script pauses (for an evaluation), a
thread sends them LATEST_S after the last step.

A rank that dies loses the held steps. Nothing is settled wrongly by that: only the answer to a question freezes a push
or fills a checkpoint, and no question overtakes a step. So the held steps were in no push, and their samples count as
still to be trained, as all work since the last freeze does. Only the agent's count of lost tokens is too low by them.

Pure: time is an argument, the rank's monotonic clock in seconds.
"""

from __future__ import annotations

from math import inf

from dips.client.ipc.messages import Stepped
from dips.dataclass import replace

FLUSH_S = 0.2  # no visible delay, and the cost of a message is shared by all steps in this time
LATEST_S = 2 * FLUSH_S  # longer than FLUSH_S, or the thread would compete with a script that does not pause


class StepBatch:
    """Accumulates the steps of one attempt; keeps no list of them."""

    def __init__(self) -> None:
        self._steps = self._tokens = self._losses = 0
        self._loss_sum, self._finite = 0.0, True
        self._newest: Stepped | None = None  # its data ranges are valid for all held steps
        self._first_s = 0.0  # when the first held step ended
        self._last_s = -inf  # when the last reported step ended
        self._sent_s = -inf  # when the last sent step ended

    def is_apart(self, ended_s: float) -> bool:
        """Return whether the held steps ended so long before this one that their mean time is no measure of it: send
        them first.
        """
        return self._steps > 0 and ended_s - self._last_s >= FLUSH_S

    def add_step(self, step: Stepped, ended_s: float) -> bool:
        """Hold a step; return whether it is time to send."""
        if not self._steps:
            self._first_s = ended_s
        self._steps += 1
        self._tokens += step.tokens
        if step.loss is not None:
            self._loss_sum, self._losses = self._loss_sum + step.loss, self._losses + 1
        self._finite &= step.finite
        self._newest, self._last_s = step, ended_s
        return ended_s - self._sent_s >= FLUSH_S

    def due_s(self) -> float:
        """Return when the held steps must be sent even if no step follows; infinity if none is held."""
        return max(self._sent_s, self._first_s) + LATEST_S if self._steps else inf

    def take_steps(self, now: float) -> Stepped | None:
        """Return the held steps as one message to be sent now; None if there is none."""
        newest = self._newest
        if newest is None:
            return None
        merged = replace(
            newest,
            tokens=self._tokens,
            loss=self._loss_sum / self._losses if self._losses else None,
            finite=self._finite,
            steps=self._steps,
            losses=self._losses,
            span_s=self._last_s - self._first_s,
            ago_s=max(0.0, now - self._last_s),
        )
        self._steps = self._tokens = self._losses = 0
        self._loss_sum, self._finite, self._newest, self._sent_s = 0.0, True, None, self._last_s
        return merged
