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

from bisect import bisect_left, insort
from dataclasses import field

from dips.dataclass import dataclass
from dips.protocol.timers import Timers

MOST_LEAD = 4  # numbers: of so many earlier ones may the heaviest push go ahead; a usual one has half of it
LATE = 1.5  # times what is expected until its next ask; steps vary, and messages travel
LENT = 1.5  # times what the push that a slot is lent to should take
NEWEST_SHARE = 0.1  # of the newest push in the mean of tokens


Place = tuple[float, int, str]  # (number less lead, number, cluster)


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

    place: Place  # the smallest is first
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
    expected: list[Place] = field(default_factory=list)  # of those that are not late, ascending
    lateness: Timers = field(default_factory=Timers)  # until when each of these is expected
    last_number: int = 0
    usual_tokens: float = 0.0  # of a push that was admitted, as a running mean; 0 before the first

    def request_slot(self, ask: SlotAsk, free: int, retry_s: float, most_kept_s: float, now: float) -> SlotAnswer:
        """Take or keep a place in the queue; leave it with one of the `free` slots, if one is to be had.

        retry_s      who is refused asks at the first boundary after so many seconds
        most_kept_s  a slot is kept for no longer
        """
        self._pass_over_late(now)
        waiter = self._find_or_enter(ask, now)
        self._unexpect(ask.cluster)
        ahead = bisect_left(self.expected, waiter.place)
        admitted = free > ahead or self._borrow(ask, self.expected[: min(free, ahead)], now)
        answer = SlotAnswer(admitted, ahead, 1 + len(self.expected))
        if admitted:
            self._weigh(ask.tokens)
            del self.waiters[ask.cluster]
        else:
            waiter.kept_s = min(most_kept_s, LATE * max(waiter.gap_s, waiter.step_s + retry_s))
            waiter.asked_at, waiter.lends, waiter.lent = now, waiter.lends and not waiter.lent, False
            insort(self.expected, waiter.place)
            self.lateness.set_timer(ask.cluster, waiter.asked_at + waiter.kept_s)
        return answer

    def count_waiting(self, now: float) -> int:
        """How many wait, without those that are late."""
        self._pass_over_late(now)
        return len(self.expected)

    def leave_queue(self, cluster: str) -> None:
        """It does not want a slot any more, or may have none."""
        self._unexpect(cluster)
        self.waiters.pop(cluster, None)

    def clear_queue(self) -> None:
        """No slot is given any more."""
        self.waiters.clear()
        self.expected.clear()
        self.lateness.clear_timers()

    def shift_times(self, gap_s: float) -> None:
        """The master did not run for `gap_s`: nobody is late by that."""
        for waiter in self.waiters.values():
            waiter.asked_at += gap_s
        expected = [self.waiters[name] for *_, name in self.expected]
        self.lateness.replace_times({w.place[2]: w.asked_at + w.kept_s for w in expected})

    def _find_or_enter(self, ask: SlotAsk, now: float) -> Waiter:
        waiter = self.waiters.get(ask.cluster)
        if waiter is None:
            self.last_number += 1
            place = (self.last_number - self._lead(ask.tokens), self.last_number, ask.cluster)
            waiter = self.waiters[ask.cluster] = Waiter(place, now, ask.step_s)
        waiter.gap_s, waiter.step_s = max(waiter.gap_s, now - waiter.asked_at), ask.step_s
        return waiter

    def _lead(self, tokens: int) -> float:
        """Of how many earlier numbers it goes ahead; a push that brings what is usual has half of MOST_LEAD."""
        return MOST_LEAD * tokens / (tokens + self.usual_tokens) if tokens else 0.0

    def _weigh(self, tokens: int) -> None:
        share = NEWEST_SHARE if self.usual_tokens else 1.0
        self.usual_tokens += share * (tokens - self.usual_tokens)

    def _pass_over_late(self, now: float) -> None:
        """Who should have asked again before now is not waited for until it does."""
        while self.lateness.first_at() < now:
            self._unexpect(self.lateness.take_first())

    def _unexpect(self, cluster: str) -> None:
        """Others go before it."""
        waiter = self.waiters.get(cluster)
        if waiter is None:
            return
        self.lateness.drop_timer(cluster)
        i = bisect_left(self.expected, waiter.place)
        if self.expected[i : i + 1] == [waiter.place]:
            del self.expected[i]

    def _borrow(self, ask: SlotAsk, first: list[Place], now: float) -> bool:
        """Take a slot that is kept for one of the first, if that one should not notice."""
        lenders = [self.waiters[name] for *_, name in first]
        until = now + LENT * ask.push_s
        if not lenders or not ask.push_s or any(not w.lends or w.asked_at + w.step_s < until for w in lenders):
            return False
        for waiter in lenders:
            waiter.lent = True
        return True
