"""Questions with the answer Pending: kept open, and asked again when something has changed.

A long poll costs its caller one call in about ten seconds, and the master one step for each change that may end the
wait. Many open questions are asked again less often, so that together they cost about as much as a few. Pure.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from dips.dataclass import dataclass
from dips.protocol.events import Event


@dataclass(frozen=True, slots=True)
class PollOptions:
    """Durations of open questions and intervals of asking them again, in seconds."""

    patience_s: float = 10.0  # then the answer is Pending: well before a client's own deadline of 30 s
    again_s: float = 2.0  # longest time until questions are asked again without a change
    pause_s: float = 0.002  # least pause between two rounds of asking, for each open question
    longest_pause_s: float = 1.0


class HeldQuestion(NamedTuple):
    """A question that is open `until` its caller's patience ends."""

    event: Event
    until: float


class HeldQuestions:
    """All open questions by their `req`, in the order in which they were first asked, so the first one ends first."""

    def __init__(self, options: PollOptions) -> None:
        self._options = options
        self._held: dict[int, HeldQuestion] = {}
        self._asked_at = -inf  # time of the last round of asking
        self._again_at = inf

    def hold_question(self, req: int, question: HeldQuestion, now: float) -> None:
        """Keep a question open that was answered with Pending."""
        self._held[req] = question
        self._again_at = min(self._again_at, now + self._options.again_s)

    def withdraw_question(self, req: int) -> None:
        """Drop a question whose caller has gone."""
        self._held.pop(req, None)

    def on_change(self, now: float) -> None:
        """Plan to ask all questions again after a change that may end the wait of any."""
        if self._held and self._again_at > now:
            pause_s = min(self._options.longest_pause_s, self._options.pause_s * len(self._held))
            self._again_at = min(self._again_at, max(now, self._asked_at + pause_s))

    def next_deadline(self) -> float:
        """Return when to call `take_due`; inf if no question is open."""
        if not self._held:
            return inf
        until = next(iter(self._held.values())).until
        return until if until < self._again_at else self._again_at

    def take_due(self, now: float) -> list[HeldQuestion]:
        """Remove and return the questions to ask again now: all of them, or those whose patience ends."""
        if now >= self._again_at:
            due = list(self._held.values())
            self._held.clear()
            self._asked_at, self._again_at = now, inf
            return due
        due = []
        while self._held and (first := next(iter(self._held.items())))[1].until <= now:
            due.append(self._held.pop(first[0]))
        return due
