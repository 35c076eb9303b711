"""Who gets the next free slot: the queue of the clusters that wait for one (docs/rationale.md#31). Pure.

A cluster that finds no slot waits: it trains on and asks again at the boundaries of its inner steps. Its place is the
number of its first ask, and stays until it pushes or its incarnation ends, whatever it is answered meanwhile; what its
push would bring moves it ahead of at most MOST_LEAD earlier numbers. A free slot is kept for the first in the queue
until that cluster should have asked again, by the length of its inner steps and by how it has asked so far. Later than
that it is late: others go before it, and its place is its own again as soon as it asks. A kept slot is lent to a push
that should be over before the cluster for which it is kept comes back.

Bounded waiting. Let N clusters share K slots, let a push hold its slot for at most H seconds, let a slot be kept for at
most L seconds (`most_kept_s`), and let no cluster that waits be late. Then one that asks has waited at most

    H + (N + MOST_LEAD) x (2 H + L) / K

seconds when it is admitted. At most N - 1 + MOST_LEAD others go before it: those that asked earlier, each once, as a
cluster has one place, and of those that ask later only some of the next MOST_LEAD numbers. Each of these, and the
cluster itself, takes a slot within L of its being free, unless a push that the slot was lent to overstays. Who finds
its slot taken lends no more, so that costs each of them H at most, once.

All of it is memory of one master: nothing is in the ledger. After a restart, places are those of the next asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nsmallest

MOST_LEAD = 4  # numbers: of so many earlier ones may the heaviest push go ahead; a usual one has half of it
LATE = 1.5  # times what is expected until its next ask; steps vary, and messages travel
LENT = 1.5  # times what the push that a slot is lent to should take
NEWEST_SHARE = 0.1  # of the newest push in the mean of tokens


@dataclass(frozen=True, slots=True)
class SlotAsk:
    """One request for a slot."""

    cluster: str
    tokens: int  # that its push would bring
    step_s: float  # of its inner steps; 0 while unknown
    push_s: float  # its push should hold a slot so long; 0 while unknown


@dataclass(frozen=True, slots=True)
class SlotAnswer:
    """What a request comes to."""

    admitted: bool
    ahead: int  # clusters that go before it; those that are late do not count
    waiting: int  # clusters that wait, itself included; those that are late do not count


@dataclass
class Waiter:
    """A cluster that waits for a slot."""

    place: tuple[float, int]  # (number less lead, number): the smallest is first
    asked_at: float
    step_s: float
    gap_s: float = 0.0  # the longest time from one of its asks to the next
    kept_s: float = 0.0  # from its last ask: so long is a slot kept for it
    lends: bool = True  # no push that its slot was lent to has overstayed
    lent: bool = False  # since its last ask


@dataclass
class SlotQueue:
    """The clusters that wait, each in one place."""

    waiters: dict[str, Waiter] = field(default_factory=dict)
    last_number: int = 0
    usual_tokens: float = 0.0  # of a push that was admitted, as a running mean; 0 before the first

    def request_slot(self, ask: SlotAsk, free: int, retry_s: float, most_kept_s: float, now: float) -> SlotAnswer:
        """Take or keep a place in the queue; leave it with one of the `free` slots, if one is to be had.

        retry_s      who is refused asks at the first boundary after so many seconds
        most_kept_s  a slot is kept for no longer
        """
        waiter = self._find_or_enter(ask, now)
        ahead = [w for w in self._expected(now) if w.place < waiter.place]
        admitted = free > len(ahead) or self._borrow(ask, ahead, free, now)
        answer = SlotAnswer(admitted, len(ahead), 1 + sum(1 for w in self._expected(now) if w is not waiter))
        if admitted:
            self._weigh(ask.tokens)
            del self.waiters[ask.cluster]
        else:
            waiter.kept_s = min(most_kept_s, LATE * max(waiter.gap_s, waiter.step_s + retry_s))
            waiter.asked_at, waiter.lends, waiter.lent = now, waiter.lends and not waiter.lent, False
        return answer

    def count_waiting(self, now: float) -> int:
        """How many wait, without those that are late."""
        return sum(1 for _ in self._expected(now))

    def leave_queue(self, cluster: str) -> None:
        """It does not want a slot any more, or may have none."""
        self.waiters.pop(cluster, None)

    def clear_queue(self) -> None:
        """No slot is given any more."""
        self.waiters.clear()

    def shift_times(self, gap_s: float) -> None:
        """The master did not run for `gap_s`: nobody is late by that."""
        for waiter in self.waiters.values():
            waiter.asked_at += gap_s

    def _find_or_enter(self, ask: SlotAsk, now: float) -> Waiter:
        waiter = self.waiters.get(ask.cluster)
        if waiter is None:
            self.last_number += 1
            place = (self.last_number - self._lead(ask.tokens), self.last_number)
            waiter = self.waiters[ask.cluster] = Waiter(place, now, ask.step_s)
        waiter.gap_s, waiter.step_s = max(waiter.gap_s, now - waiter.asked_at), ask.step_s
        return waiter

    def _lead(self, tokens: int) -> float:
        """Of how many earlier numbers it goes ahead; a push that brings what is usual has half of MOST_LEAD."""
        return MOST_LEAD * tokens / (tokens + self.usual_tokens) if tokens else 0.0

    def _weigh(self, tokens: int) -> None:
        share = NEWEST_SHARE if self.usual_tokens else 1.0
        self.usual_tokens += share * (tokens - self.usual_tokens)

    def _expected(self, now: float) -> Iterator[Waiter]:
        """Those that are not late."""
        return (w for w in self.waiters.values() if now <= w.asked_at + w.kept_s)

    def _borrow(self, ask: SlotAsk, ahead: list[Waiter], free: int, now: float) -> bool:
        """Take a slot that is kept for another, if that one should not notice."""
        lenders = nsmallest(free, ahead, key=lambda w: w.place)
        until = now + LENT * ask.push_s
        if not lenders or not ask.push_s or any(not w.lends or w.asked_at + w.step_s < until for w in lenders):
            return False
        for waiter in lenders:
            waiter.lent = True
        return True
