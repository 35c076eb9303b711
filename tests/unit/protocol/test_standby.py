"""When a master renews its lease and steps down, and when a standby claims: the two never serve at once.

No clock is read: each test drives the time of both machines. Guards docs/architecture.md#invariant-5.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import inf

import pytest

from dips.protocol.standby import (
    CLAIM_S,
    IDLE_S,
    LOOK_S,
    PRESENT_S,
    RENEW_S,
    SERVE_S,
    LeaseHolder,
    LeaseWatch,
    PresentStandbys,
    SeenLease,
    StandbyState,
    TermLease,
)

RATES = 1.45  # of one clock by the other, at most: below CLAIM_S / SERVE_S


def held(holder: LeaseHolder, now: float, *, claimable: bool = True, newest: int = 5) -> TermLease:
    """Write a lease at once."""
    lease = holder.begin_write(claimable, now)
    holder.on_written(lease, newest, now)
    return lease


# ---- who serves ------------------------------------------------------------------------------------------------------


def test_without_a_standby_a_master_serves_without_end() -> None:
    """A lease that nobody may claim does not end, whether the store answers or not."""
    holder = LeaseHolder(5, "a", bound=False)
    assert holder.serves_until() == inf
    held(holder, 0.0, claimable=False)
    holder.begin_write(False, 1000.0)  # no answer
    assert holder.serves_until() == inf and not holder.bound


def test_a_lease_that_may_be_claimed_ends_by_the_begin_of_its_last_write() -> None:
    """Not by its end: the standby may have seen it before the answer came."""
    holder = LeaseHolder(5, "a", bound=False)
    lease = holder.begin_write(True, 100.0)
    assert holder.bound and holder.serves_until() == 100.0 + SERVE_S
    holder.on_written(lease, 5, 103.0)
    assert holder.serves_until() == 100.0 + SERVE_S
    held(holder, 104.0)
    assert holder.serves_until() == 104.0 + SERVE_S
    holder.begin_write(True, 106.0)  # no answer: it is not known to be written
    assert holder.serves_until() == 104.0 + SERVE_S


def test_it_is_free_again_when_that_is_written() -> None:
    """A lease that forbids a standby to claim binds nobody, once it is known to be there."""
    holder = LeaseHolder(5, "a", bound=False)
    held(holder, 0.0)
    lease = holder.begin_write(False, 2.0)
    assert holder.bound and holder.serves_until() == SERVE_S
    holder.on_written(lease, 5, 3.0)
    assert not holder.bound and holder.serves_until() == inf


@pytest.mark.parametrize("claimable", [True, False])
def test_a_lease_that_has_ended_stays_so(claimable: bool) -> None:
    """A write that comes through too late, of either kind, brings nothing back."""
    holder = LeaseHolder(5, "a", bound=False)
    held(holder, 0.0)
    late = holder.begin_write(claimable, 2.0)
    holder.on_written(late, 5, SERVE_S)
    assert holder.over and holder.serves_until() == -inf
    held(holder, SERVE_S + 1, claimable=False)
    assert holder.over


def test_a_later_term_ends_it() -> None:
    """Whoever claimed it serves, or will."""
    holder = LeaseHolder(5, "a", bound=False)
    held(holder, 0.0, claimable=False, newest=6)
    assert holder.over and holder.serves_until() == -inf


def test_who_was_bound_before_a_restart_serves_with_a_lease_only() -> None:
    """Until it has one it does not serve, and it waits without end."""
    holder = LeaseHolder(5, "a", bound=True)
    assert holder.serves_until() == -inf and not holder.over
    holder.begin_write(True, 50.0)
    assert holder.serves_until() == -inf
    held(holder, 100.0)
    assert holder.serves_until() == 100.0 + SERVE_S


def test_a_lease_that_is_watched_is_renewed_more_often() -> None:
    """And one that nobody watches seldom, since each write costs a request."""
    holder = LeaseHolder(5, "a", bound=False)
    assert holder.pause_s(watched=False) == IDLE_S and holder.pause_s(watched=True) == RENEW_S
    held(holder, 0.0)
    assert holder.pause_s(watched=False) == RENEW_S


def test_numbers_are_given_once() -> None:
    """A write whose answer was lost may come late; it has a number of its own."""
    holder = LeaseHolder(5, "a", bound=False)
    assert [holder.begin_write(True, float(n)).number for n in range(3)] == [0, 1, 2]


def test_a_standby_is_there_while_its_file_changes() -> None:
    """One that stopped is gone after PRESENT_S, and comes back with a new number; one whose file is removed is gone."""
    present = PresentStandbys()
    assert present.on_look({"x": 1, "y": 1}, 0.0) == ("x", "y")
    assert present.on_look({"x": 2, "y": 1}, PRESENT_S) == ("x",)
    assert present.heard_s("y", PRESENT_S) == PRESENT_S
    assert present.on_look({"x": 2, "y": 2}, PRESENT_S + 1) == ("x", "y")
    assert present.on_look({"y": 2}, PRESENT_S + 2) == ("y",)


# ---- who waits -------------------------------------------------------------------------------------------------------


def seen(number: int = 0, *, term: int = 5, claimable: bool = True) -> SeenLease:
    return SeenLease(term, number, TermLease(term, number, "a", claimable))


def test_a_standby_claims_when_it_has_seen_one_lease_for_long_enough() -> None:
    """From the end of the look that saw it first, to the begin of one that sees it still."""
    watch = LeaseWatch()
    watch.on_look(seen(), 0.0, 3.0)
    assert watch.state is StandbyState.READY
    watch.on_look(seen(), 3.0 + CLAIM_S - 0.1, 100.0)
    assert watch.state is StandbyState.READY
    watch.on_look(seen(), 3.0 + CLAIM_S, 100.0)
    assert watch.state is StandbyState.CLAIMS and "for 12 s" in watch.reason


def test_a_renewal_and_a_new_term_begin_the_wait_anew() -> None:
    """Also one that another standby, or the master that starts again, has just claimed."""
    watch = LeaseWatch()
    watch.on_look(seen(7), 0.0, 0.0)
    watch.on_look(seen(8), CLAIM_S, CLAIM_S)
    assert watch.state is StandbyState.READY
    watch.on_look(seen(0, term=6), 2 * CLAIM_S, 2 * CLAIM_S)
    assert watch.state is StandbyState.READY
    watch.on_look(seen(0, term=6), 3 * CLAIM_S, 3 * CLAIM_S)
    assert watch.state is StandbyState.CLAIMS


def test_looks_that_fail_neither_shorten_the_wait_nor_end_it() -> None:
    """What is still there after a store was away was not renewed meanwhile."""
    watch = LeaseWatch()
    watch.on_look(seen(), 0.0, 0.0)
    watch.on_failed("503")
    assert watch.state is StandbyState.LOOKING and watch.reason == "503"
    watch.on_look(seen(), CLAIM_S, CLAIM_S)
    assert watch.state is StandbyState.CLAIMS


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (SeenLease(0), StandbyState.EMPTY),
        (SeenLease(5), StandbyState.FORBIDDEN),
        (seen(claimable=False), StandbyState.FORBIDDEN),
        (SeenLease(5, 3, problem="it is not whole"), StandbyState.REFUSED),
    ],
)
def test_what_forbids_a_claim_forbids_it_for_ever(found: SeenLease, state: StandbyState) -> None:
    """No ledger, no lease, one that says no, one that is torn: an operator decides."""
    watch = LeaseWatch()
    for now in (0.0, CLAIM_S, 1e6):
        watch.on_look(found, now, now)
        assert watch.state is state and watch.reason


# ---- both ------------------------------------------------------------------------------------------------------------


@dataclass
class Store:
    """Leases by their number, each from some time on; nothing is known of a clock."""

    arrivals: list[tuple[float, TermLease]] = field(default_factory=list)

    def read(self, at: float) -> SeenLease:
        there = [lease for when, lease in self.arrivals if when <= at]
        newest = max(there, key=lambda lease: (lease.term, lease.number), default=None)
        return SeenLease(0) if newest is None else SeenLease(newest.term, newest.number, newest)


def test_a_standby_never_claims_while_the_holder_serves() -> None:
    """Whatever the store delays, loses or carries out late, and however far the two clocks drift apart."""
    for seed in range(300):
        _watch_a_holder(seed)


def _watch_a_holder(seed: int) -> None:
    """One serves until it dies, the other looks on and claims at some time; whatever happens to either is drawn."""
    rng, store = random.Random(seed), Store()
    rate, offset = rng.uniform(1 / RATES, RATES), rng.uniform(-1e6, 1e6)  # of the holder's clock, by the standby's
    ours = lambda at: at * rate + offset  # noqa: E731
    holder, watch = LeaseHolder(5, "a", bound=False), LeaseWatch()
    quick, loss = rng.choice((0.2, 3.0, 9.0)), rng.choice((0.0, 0.3, 0.8))
    at, next_write, next_look, dead = 0.0, 0.0, 0.0, rng.uniform(5.0, 60.0)
    pending: list[tuple[float, TermLease]] = []  # answers that are on their way
    while at < 200.0:
        times = [next_look, *(when for when, _ in pending[:1]), *([next_write] if not pending and at < dead else [])]
        at = min(times)
        if pending and at == pending[0][0]:
            holder.on_written(pending.pop()[1], store.read(at).newest_term, ours(at))
        elif at == next_look:
            took_s = rng.uniform(0.0, quick)
            if rng.random() >= loss:
                watch.on_look(store.read(at + rng.uniform(0.0, took_s)), at, at + took_s)
            else:
                watch.on_failed("503")
            next_look = at + took_s + LOOK_S
            if watch.state is StandbyState.CLAIMS:
                until = holder.serves_until()
                assert holder.bound or holder.over, f"seed {seed}: a lease that may not be claimed was"
                assert until <= ours(at), f"seed {seed}: it serves for {until - ours(at):.2f} s of its clock more"
                return
        else:
            lease = holder.begin_write(rng.random() < 0.9, ours(at))
            took_s = rng.uniform(0.0, quick)
            if rng.random() >= loss:
                store.arrivals.append((at + rng.uniform(0.0, took_s), lease))
                pending = [(at + took_s, lease)]
            elif rng.random() < 0.5:
                store.arrivals.append((at + rng.uniform(0.0, 40.0), lease))  # its answer is lost
            next_write = at + took_s + rng.uniform(0.5, 1.5) * RENEW_S / rate
