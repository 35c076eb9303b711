"""A cluster's time by cause (Figure 17 of Di-PS) and its training rate. No clock, no messages."""

from __future__ import annotations

from collections import deque

from dips.telemetry.histogram import Histogram

# Inner steps, and the causes of waiting; only under the first do accelerators train.
CAUSES = (
    "inner",  # between two calls of the outer loop
    "slot",  # for a slot on all slaves
    "push",  # for its own bytes to move, and to be committed
    "window",  # for the round's other pushes
    "update",  # for the outer step, its snapshots and the flip
    "pull",  # for the new version to arrive and to be installed
    "data",  # for a data range
    "join",  # for the master to take it into the run
    "start",  # for the trainer to import, build and attach
    "failure",  # for a trainer that died to come back
    "ended",  # after its own goodbye
)
WAITS = ("slot", "push", "window", "update", "pull", "data", "join")  # causes with a histogram of single waits
RATE_S = 60.0  # span of the mean token rate


class Tally:
    """The seconds by cause and the tokens over time of one agent."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.tokens = 0
        self.moved = {"push": 0, "pull": 0}  # bytes of completed transfers
        self._cause, self._since = "start", -1.0
        self._waited = 0.0  # seconds in the present window
        self._spell = 0.0  # seconds since the cause last changed
        self.waits = {cause: Histogram() for cause in WAITS}
        self._earned: deque[tuple[float, int]] = deque()

    @property
    def cause(self) -> str:
        return self._cause

    def switch_cause(self, cause: str, now: float) -> None:
        """Count time from `now` on under `cause`."""
        if self._since >= 0:
            passed = now - self._since
            if passed > 0.0:
                self.seconds[self._cause] += passed
                self._waited += passed if self._cause == "window" else 0.0
                self._spell += passed
        if cause != self._cause:
            if self._cause in self.waits and self._since >= 0:
                self.waits[self._cause].observe_value(self._spell)
            self._spell = 0.0
        if cause != "window":
            self._waited = 0.0
        self._cause, self._since = cause, now

    def count_update(self, update_s: float) -> None:
        """Move `update_s` of the present wait from the window to the update."""
        share = min(max(update_s, 0.0), self._waited)
        self.seconds["window"] -= share
        self.seconds["update"] += share
        self.waits["update"].observe_value(share)
        self._spell -= share if self._cause == "window" else 0.0
        self._waited = 0.0

    def record_step(self, tokens: int, now: float) -> None:
        """Count the tokens of an inner step."""
        self.tokens += tokens
        self._earned.append((now, tokens))
        self._forget_old(now)

    def token_rate(self, now: float) -> float:
        """Return the tokens per second over the last RATE_S seconds, pauses included."""
        self._forget_old(now)
        return sum(tokens for _, tokens in self._earned) / RATE_S

    def seconds_by_cause(self, now: float) -> dict[str, float]:
        """Return the seconds by cause until `now`."""
        passed = max(0.0, now - self._since) if self._since >= 0 else 0.0
        return {**self.seconds, self._cause: self.seconds[self._cause] + passed}

    def _forget_old(self, now: float) -> None:
        while self._earned and self._earned[0][0] < now - RATE_S:
            self._earned.popleft()
