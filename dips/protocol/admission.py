"""The queue of clusters that wait for a slot, and who gets the next free one (docs/rationale.md#31). Pure.

A cluster that finds no free slot trains on and asks again at the boundaries of its inner steps. Its place is the number
of its first request and stays until it pushes or its incarnation ends, whatever answers it gets meanwhile. A push with
many tokens moves its cluster ahead of at most MOST_LEAD earlier numbers. A free slot is kept for the first cluster in
the queue until that cluster should have asked again, estimated from the length of its inner steps and from its earlier
requests. After that time the cluster is late: others go first, and it gets its place back as soon as it asks. A kept
slot is lent to another push that should be over before the cluster it is kept for comes back.

Bounded waiting. Let N clusters share K slots, let a push hold its slot for at most H seconds, let a slot be kept for at
most L seconds (`most_kept_s`), and let no waiting cluster be late. Then a cluster that asks has waited at most

    H + (N + MOST_LEAD) x (2 H + L) / K

seconds when it is admitted. At most N - 1 + MOST_LEAD others go before it: those that asked earlier, each once since a
cluster has one place, and some of the next MOST_LEAD numbers. Each of these, and the cluster itself, takes a slot
within L of the moment it becomes free, unless a push that borrowed the slot overstays. A cluster that finds its slot
taken lends no more, so a borrower costs each of them at most H, once.

The queue is kept in memory only, not in the ledger. After a restart of the master, places follow the next requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import field

from dips.dataclass import dataclass
from dips.protocol.transfer_book import Timers

MOST_LEAD = 4  # earlier numbers that the push with the most tokens may overtake; a usual push overtakes half as many
LATE = 1.5  # factor on the time expected until its next request: steps vary, and messages travel
LENT = 1.5  # factor on the expected duration of the push that borrows a slot
NEWEST_SHARE = 0.1  # weight of the newest push in the running mean of tokens


Place = tuple[float, int, str]  # (number less lead, number, cluster)


@dataclass(frozen=True, slots=True)
class SlotAsk:
    """One request for a slot."""

    cluster: str
    tokens: int  # tokens that the push would bring
    step_s: float  # duration of its inner steps; 0 while unknown
    push_s: float  # how long its push should hold a slot; 0 while unknown


@dataclass(frozen=True, slots=True)
class SlotAnswer:
    """The answer to a request for a slot."""

    admitted: bool
    ahead: int  # clusters before it in the queue, without those that are late
    waiting: int  # clusters in the queue, itself included, without those that are late


@dataclass
class Waiter:
    """A cluster that waits for a slot."""

    place: Place  # the smallest is first
    asked_at: float
    step_s: float
    gap_s: float = 0.0  # the longest time from one of its asks to the next
    kept_s: float = 0.0  # how long after its last request a slot is kept for it
    lends: bool = True  # False after a push that borrowed its slot overstayed
    lent: bool = False  # whether its slot was lent since its last request


@dataclass
class SlotQueue:
    """The queue: the clusters that wait for a slot, each with one place."""

    waiters: dict[str, Waiter] = field(default_factory=dict)
    expected: list[Place] = field(default_factory=list)  # places of clusters that are not late, ascending
    lateness: Timers = field(default_factory=Timers)  # when each of these becomes late
    last_number: int = 0
    usual_tokens: float = 0.0  # running mean of the tokens of admitted pushes; 0 before the first

    def request_slot(self, ask: SlotAsk, free: int, retry_s: float, most_kept_s: float, now: float) -> SlotAnswer:
        """Answer a request for a slot: admit the push and remove its cluster from the queue, or keep its place there.

        free         free slots
        retry_s      a refused cluster asks again at the first boundary of its inner steps after this time
        most_kept_s  the longest time for which a slot is kept for a cluster
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
        """Return the number of clusters that wait, without those that are late."""
        self._pass_over_late(now)
        return len(self.expected)

    def leave_queue(self, cluster: str) -> None:
        """Remove a cluster that no longer wants a slot or may not have one."""
        self._unexpect(cluster)
        self.waiters.pop(cluster, None)

    def shift_times(self, gap_s: float) -> None:
        """Shift all times by `gap_s`, during which the master did not run, so that this makes no cluster late."""
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
        """Return how many earlier numbers this push overtakes; a push with the usual number of tokens overtakes
        MOST_LEAD / 2.
        """
        return MOST_LEAD * tokens / (tokens + self.usual_tokens) if tokens else 0.0

    def _weigh(self, tokens: int) -> None:
        share = NEWEST_SHARE if self.usual_tokens else 1.0
        self.usual_tokens += share * (tokens - self.usual_tokens)

    def _pass_over_late(self, now: float) -> None:
        """Stop keeping slots for clusters that should have asked again before `now`."""
        while self.lateness.first_at() < now:
            self._unexpect(self.lateness.take_first())

    def _unexpect(self, cluster: str) -> None:
        """Let the other clusters go before this one until it asks again."""
        waiter = self.waiters.get(cluster)
        if waiter is None:
            return
        self.lateness.drop_timer(cluster)
        i = bisect_left(self.expected, waiter.place)
        if self.expected[i : i + 1] == [waiter.place]:
            del self.expected[i]

    def _borrow(self, ask: SlotAsk, first: list[Place], now: float) -> bool:
        """Borrow a slot that is kept for a cluster at the head of the queue, if the push should end before that one
        asks.
        """
        lenders = [self.waiters[name] for *_, name in first]
        until = now + LENT * ask.push_s
        if not lenders or not ask.push_s or any(not w.lends or w.asked_at + w.step_s < until for w in lenders):
            return False
        for waiter in lenders:
            waiter.lent = True
        return True
