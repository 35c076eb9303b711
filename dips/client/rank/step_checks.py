"""Says, once each, what a training script seems to have got wrong: nothing fails by it, and the run suffers."""

from __future__ import annotations

import json
import warnings

from dips.client.rank.collectives import JobCollectives

STEPS_SEEN = 16  # calls of `step` before they are compared with the optimizer's

PER_MICRO_BATCH = (
    "OuterLoop.step was called {calls} times in {steps} optimizer steps: call it once after each optimizer.step(), "
    "with the tokens of all its micro-batches"
)
PER_RANK = (
    "OuterLoop.step: the ranks passed {tokens} tokens, and rank 0's number counts for the whole cluster: pass the "
    "tokens of all ranks together, the same number on each"
)


class StepChecks:
    """One rank's calls of `step`; rank 0 warns."""

    def __init__(self, collectives: JobCollectives) -> None:
        self._collectives = collectives
        self._calls = self._tokens = 0
        self._compared = False

    def on_step(self, tokens: int, optimizer_steps: int) -> None:
        """One call; `optimizer_steps` since the loop was made, 0 if they are not seen."""
        self._calls, self._tokens = self._calls + 1, self._tokens + tokens
        if self._calls == STEPS_SEEN and 0 < 2 * optimizer_steps <= self._calls:
            self._warn(PER_MICRO_BATCH.format(calls=self._calls, steps=optimizer_steps))

    def compare_ranks(self) -> None:
        """Compare the ranks' tokens, the first time it is called; collective. A rank that passes none means rank 0."""
        if self._compared:
            return
        self._compared = True
        tokens = [json.loads(told) for told in self._collectives.all_gather(json.dumps(self._tokens).encode())]
        if len({told for told in tokens if told}) > 1:
            shown = ", ".join(str(told) for told in tokens[:4]) + (" …" if len(tokens) > 4 else "")
            self._warn(PER_RANK.format(tokens=shown))

    def _warn(self, text: str) -> None:
        if self._collectives.rank == 0:
            warnings.warn(text, stacklevel=4)
