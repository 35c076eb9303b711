"""The queue for slots: places are kept, slots are kept and lent, tokens lead a little, waiting is bounded."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import ceil
from random import Random

import pytest

from dips.protocol.admission import LATE, MOST_LEAD, SlotAnswer, SlotAsk, SlotQueue

RETRY_S, MOST_KEPT_S = 2.0, 100.0


def ask(
    queue: SlotQueue, name: str, free: int, now: float, tokens: int = 0, step_s: float = 1.0, push_s: float = 0.0
) -> SlotAnswer:
    return queue.request_slot(SlotAsk(name, tokens, step_s, push_s), free, RETRY_S, MOST_KEPT_S, now)


def test_a_place_is_kept_over_refusals_and_step_boundaries() -> None:
    """Who asked first gets the slot, however often others ask in between."""
    queue = SlotQueue()
    assert [ask(queue, name, 0, at) for at, name in enumerate("abc")] == [
        SlotAnswer(False, ahead, ahead + 1) for ahead in range(3)
    ]
    assert not any(ask(queue, name, 1, 3.0).admitted for name in "cbcb")
    assert ask(queue, "a", 1, 3.5).admitted
    assert ask(queue, "b", 1, 3.6) == SlotAnswer(True, 0, 2)
    assert list(queue.waiters) == ["c"]


def test_who_was_admitted_begins_anew_at_the_end() -> None:
    """A cluster that pushes and comes back goes behind those that wait."""
    queue = SlotQueue()
    assert ask(queue, "a", 1, 0.0).admitted
    ask(queue, "b", 0, 1.0)
    assert ask(queue, "a", 1, 2.0) == SlotAnswer(False, 1, 2)


def test_each_free_slot_is_kept_for_one() -> None:
    """Two slots are free and two wait: the third is refused, the second is not."""
    queue = SlotQueue()
    for name in "ab":
        ask(queue, name, 0, 0.0)
    assert not ask(queue, "c", 2, 1.0).admitted
    assert ask(queue, "b", 2, 1.0).admitted
    assert ask(queue, "c", 2, 1.0).admitted


def test_a_slot_is_kept_for_as_long_as_the_steps_of_its_cluster_take() -> None:
    """Late are those who should have asked again: others pass, and their place is theirs when they come back."""
    kept_s = LATE * (20.0 + RETRY_S)
    for waited_s, admitted in ((kept_s - 0.1, False), (kept_s + 0.1, True)):
        queue = SlotQueue()
        ask(queue, "slow", 0, 0.0, step_s=20.0)
        assert ask(queue, "fast", 1, waited_s).admitted is admitted
        ask(queue, "other", 0, waited_s)
        assert ask(queue, "slow", 1, waited_s + 1.0) == SlotAnswer(True, 0, 2 if admitted else 3)


def test_what_was_seen_of_a_cluster_counts_more_than_what_it_tells() -> None:
    """A cluster that comes back late is waited for as long, the next time."""
    queue = SlotQueue()
    ask(queue, "slow", 0, 0.0, step_s=0.0)
    ask(queue, "slow", 0, 30.0, step_s=0.0)
    assert not ask(queue, "fast", 1, 30.0 + LATE * 30.0 - 0.1).admitted


def test_of_uneven_gaps_the_longest_counts() -> None:
    """A cluster that once came back after 30 s, and then after 5, is waited for by the 30."""
    queue = SlotQueue()
    for asked_at in (0.0, 30.0, 35.0):
        ask(queue, "slow", 0, asked_at, step_s=0.0)
    assert not ask(queue, "fast", 1, 35.0 + LATE * 30.0 - 0.1).admitted
    assert ask(queue, "fast", 1, 35.0 + LATE * 30.0 + 0.1).admitted


def test_one_huge_push_does_not_become_what_is_usual() -> None:
    """A push that brings a little more than the mean goes before two of three, whatever came last."""
    queue = SlotQueue()
    for number in range(20):
        assert ask(queue, "usual", 1, float(number), tokens=100).admitted
    assert ask(queue, "heavy", 1, 20.0, tokens=1000).admitted
    for name in "abc":
        ask(queue, name, 0, 21.0, tokens=0)
    assert ask(queue, "d", 0, 21.0, tokens=200) == SlotAnswer(False, 1, 4)


def test_nobody_is_waited_for_beyond_the_limit() -> None:
    """An absurd step does not keep a slot for ever."""
    queue = SlotQueue()
    ask(queue, "slow", 0, 0.0, step_s=1e9)
    assert not ask(queue, "fast", 1, MOST_KEPT_S).admitted
    assert ask(queue, "fast", 1, MOST_KEPT_S + 0.1).admitted


def test_a_gap_of_the_master_makes_nobody_late() -> None:
    """While the master did not run nobody could ask."""
    queue = SlotQueue()
    ask(queue, "a", 0, 0.0)
    queue.shift_times(1000.0)
    assert not ask(queue, "b", 1, 1001.0).admitted


def test_tokens_lead_by_a_bounded_number() -> None:
    """A push that brings much goes ahead of those that asked just before it, and of no others."""
    queue = SlotQueue()
    assert ask(queue, "usual", 1, 0.0, tokens=100).admitted
    for name in "abc":
        ask(queue, name, 0, 1.0, tokens=100)
    assert ask(queue, "heavy", 0, 1.0, tokens=10**12) == SlotAnswer(False, 2, 4)
    assert ask(queue, "light", 0, 1.0, tokens=0) == SlotAnswer(False, 4, 5)
    for i in range(MOST_LEAD):
        ask(queue, f"later-{i}", 0, 1.0, tokens=10**12)
    assert ask(queue, "a", 0, 1.0) == SlotAnswer(False, 0, 9)
    assert ask(queue, "light", 0, 1.0).ahead < 4 + MOST_LEAD


def test_a_slot_is_lent_by_all_who_may_want_it() -> None:
    """Two slots are free for two who wait: the one who asks again soon could find both taken."""
    for soon_s, admitted in ((1.0, False), (20.0, True)):
        queue = SlotQueue()
        ask(queue, "soon", 0, 0.0, step_s=soon_s)
        ask(queue, "slow", 0, 0.0, step_s=20.0)
        assert ask(queue, "fast", 2, 0.5, push_s=5.0).admitted is admitted


def test_a_slot_is_lent_to_a_push_that_is_over_in_time() -> None:
    """The one for whom it is kept must not notice; whose push takes longer, or an unknown time, is refused."""
    queue = SlotQueue()
    ask(queue, "slow", 0, 0.0, step_s=20.0)
    assert not ask(queue, "fast", 1, 1.0, push_s=0.0).admitted
    assert not ask(queue, "fast", 1, 11.0, push_s=6.1).admitted
    assert ask(queue, "fast", 1, 11.0, push_s=5.9).admitted
    assert ask(queue, "slow", 1, 20.0, step_s=20.0).admitted


def test_who_found_its_slot_taken_lends_no_more() -> None:
    """A push that overstays costs the lender once."""
    queue = SlotQueue()
    ask(queue, "slow", 0, 0.0, step_s=20.0)
    assert ask(queue, "fast", 1, 1.0, push_s=5.0).admitted
    assert not ask(queue, "slow", 0, 20.0, step_s=20.0).admitted
    assert not ask(queue, "fast", 1, 21.0, push_s=5.0).admitted


def test_who_leaves_is_gone() -> None:
    """No slot is kept for it, and it comes back as the last."""
    queue = SlotQueue()
    ask(queue, "a", 0, 0.0)
    ask(queue, "b", 0, 0.0)
    queue.leave_queue("a")
    assert ask(queue, "a", 0, 0.5) == SlotAnswer(False, 1, 2)
    queue.leave_queue("a")
    assert ask(queue, "b", 1, 1.0) == SlotAnswer(True, 0, 1)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_longer_than_the_bound(seed: int) -> None:
    """Clusters of random speed, tokens and pushes that may overstay: the wait is bounded as the module says."""
    rng = Random(seed)
    slots, steps = rng.randint(1, 3), [rng.choice((0.5, 2.0, 20.0)) for _ in range(rng.randint(2, 9))]
    told, longest = 3.0, 6.0
    bound_s = longest + (len(steps) + MOST_LEAD) * (2 * longest + LATE * (max(steps) + RETRY_S)) / slots
    queue, free, order = SlotQueue(), slots, count()
    first: dict[int, float] = {}
    events = [(rng.random() * 20, next(order), i, "asks") for i in range(len(steps))]
    waits = list[float]()
    while (now := events[0][0]) < 2000.0:
        _, _, i, what = heappop(events)
        if what == "ends":
            free += 1
            heappush(events, (now + steps[i] * rng.randint(1, 3), next(order), i, "asks"))
            continue
        first.setdefault(i, now)
        tokens, push_s = rng.randint(0, 1000), rng.choice((0.0, told))
        if ask(queue, str(i), free, now, tokens, steps[i], push_s).admitted:
            assert free > 0
            free -= 1
            waits.append(now - first.pop(i))
            heappush(events, (now + rng.uniform(0.5, longest), next(order), i, "ends"))
        else:
            boundaries = max(1, ceil(RETRY_S / steps[i]))
            heappush(events, (now + boundaries * steps[i], next(order), i, "asks"))
    assert max([*waits, *(2000.0 - at for at in first.values())]) <= bound_s
    assert len(waits) > 50
