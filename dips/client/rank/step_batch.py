"""Inner steps that rank 0 has reported and not sent yet: fast ones go to the agent together, as one message.

A message for each step would cost more than all the rest of `OuterLoop.step`. So steps are held back until FLUSH_S have
passed since the last that was sent; one that took as long itself goes out at once. Whatever else goes to the agent
sends them first (AgentClient): what it counts when it is asked something is what the script has trained. A script that
pauses (an evaluation) takes no further step that would send them: LATEST_S after the last one a thread does.

A rank that dies takes what it holds with it. Nothing is settled wrongly by that: only the answer to a question freezes
a push or fills a checkpoint, and no question overtakes a step. So what is held was in no push, and its samples count as
still to be trained, as does all work since the last freeze. Only the agent's number of tokens lost is short of it.

Pure: time is an argument, the rank's monotonic clock in seconds.
"""

from __future__ import annotations

from math import inf

from dips.client.ipc.messages import Stepped
from dips.dataclass import replace

FLUSH_S = 0.2  # a person sees no delay, and what a message costs is shared by all steps of that time
LATEST_S = 2 * FLUSH_S  # longer, or the thread would compete with the steps of a script that does not pause


class StepBatch:
    """Adds up the steps of one attempt; keeps no list of them."""

    def __init__(self) -> None:
        self._steps = self._tokens = self._losses = 0
        self._loss_sum, self._finite = 0.0, True
        self._newest: Stepped | None = None  # its data ranges are those of all
        self._first_s = 0.0  # the first held one ended
        self._last_s = -inf  # the last reported one ended
        self._sent_s = -inf  # the last sent one ended

    def is_apart(self, ended_s: float) -> bool:
        """The held steps ended so long before this one that their times would say nothing of it: they go first."""
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
        """When what is held must go out though no step comes; infinity if nothing is held."""
        return max(self._sent_s, self._first_s) + LATEST_S if self._steps else inf

    def take_steps(self, now: float) -> Stepped | None:
        """What is held, as one message that is sent now; None if it is nothing."""
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
