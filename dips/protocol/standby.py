"""A second master: when the one that serves renews its lease, when it steps down, and when the other may claim a term.

Both know each other by the store of the ledger's mirror only: files with a term and a number, where the highest of the
newest term is the lease. Must stay true (docs/protocol.md#a-second-master):

* A standby claims a term only if the lease says that one may, and after it has seen the same lease for CLAIM_S.
* Who wrote such a lease serves for SERVE_S after it began to write the newest that it knows to be written, no longer.
  SERVE_S < CLAIM_S, so it has stopped before the other begins. Durations only are compared, each by its own monotonic
  clock; clocks may run at rates that differ by half.
* Until a lease without that permission is written, with no later term beside it, nothing is told that the mirror lacks.

Pure: the shells in dips/master/standby.py read and write the files, and pass the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import inf

from dips.dataclass import dataclass
from dips.protocol.releases import added

RENEW_S = 2.0  # between two writes of a lease that a standby watches
IDLE_S = 10.0  # between two writes of one that nobody watches: a standby is noticed within so much
SERVE_S = 8.0  # a holder serves for so long after it began to write its lease; four renewals
CLAIM_S = 12.0  # a standby sees the same lease for so long before it claims: 1.5 times SERVE_S
LOOK_S = 1.0  # between two looks of a standby
PRESENT_S = 15.0  # a standby whose file has not changed for so long is gone


@dataclass(frozen=True, slots=True)
class TermLease:
    """The lease of a term as it is written; its number rises with each write."""

    term: int
    number: int
    holder: str  # for people
    claimable: bool  # a standby may take over when this is not renewed
    nonce: str = ""  # of the process that wrote it: two never write the same bytes
    place: str = added(2, "")  # where its holder runs: a process that starts again there has the same one


# ---- who serves -----------------------------------------------------------------------------------------------------


class LeaseHolder:
    """The lease of the master that serves. All times are seconds of its own monotonic clock."""

    def __init__(self, term: int, holder: str, *, bound: bool, nonce: str = "", place: str = "") -> None:
        """With `bound` it serves only with a lease: a standby may have been told that it may claim."""
        self._term, self._holder, self._bound, self._nonce, self._place = term, holder, bound, nonce, place
        self._number = -1
        self._begun = self._renewed = -inf
        self._claimable = False  # in the newest lease that is known to be written
        self._over = False

    @property
    def bound(self) -> bool:
        """Whether it stops when it cannot renew, and may tell nothing that its mirror lacks."""
        return self._bound

    @property
    def claimable(self) -> bool:
        return self._claimable

    @property
    def over(self) -> bool:
        """Whether this lease has ended for good."""
        return self._over

    def begin_write(self, claimable: bool, now: float) -> TermLease:
        """Return the lease to write now; a number is given once, so that a late write replaces nothing.

        With `claimable` it is bound from now on, whether the write succeeds or not.
        """
        if claimable and not self._bound:  # no standby has seen a lease that it may claim: SERVE_S begins here
            self._bound, self._renewed = True, now
        self._number += 1
        self._begun = now
        return TermLease(self._term, self._number, self._holder, claimable, self._nonce, self._place)

    def on_written(self, lease: TermLease, newest_term: int, now: float) -> None:
        """Record that the lease of the last `begin_write` is written, and then this was the newest term in the store.

        A lease that has ended meanwhile has ended for good: a standby may have begun to count before this one came.
        """
        ended = self._renewed > -inf and now >= self.serves_until()
        self._over = self._over or ended or newest_term > self._term
        if not self._over:
            self._renewed, self._bound, self._claimable = self._begun, lease.claimable, lease.claimable

    def serves_until(self) -> float:
        """Return until when it may serve; inf if no standby may take over, -inf if it may not, or not yet."""
        if self._over:
            return -inf
        return self._renewed + SERVE_S if self._bound else inf

    def pause_s(self, watched: bool) -> float:
        """Return how long after the begin of a write the next one is due."""
        return RENEW_S if self._bound or watched else IDLE_S

    def age_s(self, now: float) -> float | None:
        """Return the time since the lease was written; None if it never was."""
        return None if self._renewed == -inf else now - self._renewed


class PresentStandbys:
    """Which standbys are there, by files that each changes as long as it runs. Times as for LeaseHolder."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # name → (number in its file, when that was first seen)

    def on_look(self, numbers: Mapping[str, int], now: float) -> tuple[str, ...]:
        """Take the number in each standby's file; return those that are present. A new one is."""
        self._seen = {
            name: before if (before := self._seen.get(name)) is not None and before[0] == number else (number, now)
            for name, number in numbers.items()
        }
        return tuple(name for name, (_, since) in sorted(self._seen.items()) if now - since < PRESENT_S)

    def heard_s(self, name: str, now: float) -> float:
        """Return the time since the file of a standby changed."""
        return now - self._seen[name][1]


# ---- who waits ------------------------------------------------------------------------------------------------------


class StandbyState(StrEnum):
    """State of a standby: what it does, or why it does not claim."""

    LOOKING = "looking"  # it has not read the store yet, or cannot
    EMPTY = "empty"  # the run has not begun
    REFUSED = "refused"  # the lease is torn, of another run, or of a later version of Di-PS
    FORBIDDEN = "forbidden"  # the lease says that a standby would lose something, or says nothing
    READY = "ready"  # the lease is renewed, or not for CLAIM_S yet
    CLAIMS = "claims"  # nobody holds the lease


@dataclass(frozen=True, slots=True)
class SeenLease:
    """Result of a standby's look. Without a lease `problem` says what is wrong with it."""

    newest_term: int  # of any file in the store; 0: there is none
    number: int = -1  # of the newest file with the lease of that term
    lease: TermLease | None = None
    problem: str = ""
    transactions: int = added(2, 0)  # of that term


class LeaseWatch:
    """Decides whether a standby may claim. All times are seconds of its own monotonic clock."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._since = inf  # the first look that found it has ended
        self.unchanged_s = 0.0  # how long the lease had been seen unchanged when the last look began
        self.state, self.reason = StandbyState.LOOKING, "it has not read the store yet"

    def on_failed(self, problem: str) -> None:
        """Record a look that failed. What was seen is kept: if the next one finds the same, nobody has renewed it."""
        self.state, self.reason = StandbyState.LOOKING, problem

    def on_look(self, seen: SeenLease, begun: float, ended: float) -> None:
        """Take a look that began and ended at these times; `state` and `reason` are new afterwards."""
        if (seen.newest_term, seen.number) != self._seen:
            self._seen, self._since = (seen.newest_term, seen.number), ended
        self.unchanged_s = begun - self._since
        self.state, self.reason = self._judge(seen, self.unchanged_s)

    def _judge(self, seen: SeenLease, unchanged_s: float) -> tuple[StandbyState, str]:
        lease = seen.lease
        if not seen.newest_term:
            return StandbyState.EMPTY, "the mirror has no ledger yet: the run has not begun"
        if seen.problem:
            return StandbyState.REFUSED, seen.problem
        if lease is None:
            return StandbyState.FORBIDDEN, f"the master of term {seen.newest_term} has written no lease"
        if not lease.claimable:
            return StandbyState.FORBIDDEN, (
                f"{lease.holder} serves term {lease.term}, and does not let a standby take over: it has not seen this "
                "one yet, or its mirror lags"
            )
        if unchanged_s < CLAIM_S:
            return StandbyState.READY, f"{lease.holder} serves term {lease.term}"
        return StandbyState.CLAIMS, f"{lease.holder} has not renewed the lease of term {lease.term} for {CLAIM_S:g} s"
