"""What is found without a look at everything, held to plain models: timers, intervals, ranges, last norms, the queue.

The indexes of a whole run are held to scans in the simulation (tests/simulation/indexes.py).
"""

from __future__ import annotations

from math import inf
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dips.protocol.admission import MOST_LEAD, SlotAsk, SlotQueue
from dips.protocol.alignment import plan_leads
from dips.protocol.data import Intervals, RangeBook
from dips.protocol.gates.norms import LastNorms
from dips.protocol.options import DataOptions
from dips.protocol.records import PenaltyRow
from dips.protocol.transfer_book import STALE_KEPT, Timers

NAMES = st.sampled_from("abc")
TIMES = st.one_of(st.floats(0.0, 9.0), st.just(-inf))


@given(st.lists(st.tuples(st.sampled_from("sdtm"), NAMES, TIMES), max_size=60))
@example([("s", "a", 1.0), ("s", "a", 2.0)])
def test_the_first_of_many_times(script: list[tuple[str, str, float]]) -> None:
    """Set, dropped, taken or moved: the earliest is that of a plain dict, and the heap does not grow without bound."""
    timers, plain = Timers(), dict[str, float]()
    for verb, name, at in script:
        if verb == "s":
            timers.set_timer(name, at)
            plain[name] = at
        elif verb == "d":
            timers.drop_timer(name)
            plain.pop(name, None)
        elif verb == "t":
            due = timers.take_due(at)
            assert due == sorted((n for n, t in plain.items() if t <= at), key=lambda n: (plain[n], n))
            for taken in due:
                del plain[taken]
        else:
            timers.shift_times(1.5)
            plain = {n: t + 1.5 for n, t in plain.items()}
        assert (timers.at, timers.first_at()) == (plain, min(plain.values(), default=inf))
        assert len(timers.heap) <= 2 * max(1, len(plain)) + STALE_KEPT + 4


def test_a_time_that_moves_for_ever_costs_no_memory() -> None:
    """A deadline is renewed by every heartbeat, and seldom comes to the top."""
    timers = Timers()
    for n in range(1_000):
        timers.set_timer("first", 0.0)
        timers.set_timer("renewed", 1.0 + n)
        assert len(timers.heap) <= 4 + STALE_KEPT
    assert timers.take_due(1_000.0) == ["first", "renewed"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=60), st.sets(st.integers(0, 20)))
def test_intervals_are_a_set(script: list[tuple[bool, int]], taken: set[int]) -> None:
    """Numbers come and go as in a set; intervals are in order, hold something, and never touch."""
    free, plain = Intervals.of(taken).gaps_below(12), set(range(12)) - taken
    for add, number in script:
        if add:
            free.add_number(number)
            plain.add(number)
        else:
            assert free.remove_number(number) is (number in plain)
            plain.discard(number)
        assert (list(free), free.count) == (sorted(plain), len(plain))
        assert all((n in free) is (n in plain) for n in range(-1, 14))
        edges = [edge for pair in zip(free.begins, free.ends, strict=True) for edge in pair]
        assert edges == sorted(set(edges))
    if plain:
        assert free.take_smallest() == min(plain)


class PlainBook:
    """Who holds which range, by looking at all of them."""

    def __init__(self, total: int) -> None:
        self.free, self.held = set(range(total)), {name: list[int]() for name in "ab"}

    def lease(self, name: str, count: int, claims: list[int]) -> tuple[int, ...]:
        taken = [n for n in dict.fromkeys(claims) if n in self.free] if claims else sorted(self.free)[:count]
        self.free.difference_update(taken)
        self.held[name] += taken
        return tuple(taken)


@given(
    st.lists(st.tuples(st.sampled_from("lcser"), st.sampled_from("ab"), st.lists(st.integers(0, 14), max_size=4))),
    st.booleans(),
)
def test_ranges_are_leased_as_from_a_plain_book(script: list[tuple[str, str, list[int]]], requeue: bool) -> None:
    """The smallest free ones first, claims by name, and what is released or undone is free again."""
    book, plain, seqs = RangeBook(DataOptions(ranges=12), requeue=requeue), PlainBook(12), {"a": 0, "b": 0}
    for verb, name, numbers in script:
        if verb in "lc":
            seqs[name] += 1
            claims = numbers if verb == "c" else []
            expected = plain.lease(name, len(numbers), claims)
            assert book.lease_ranges(name, 1, seqs[name], len(numbers), claims) == (expected, True)
        elif verb == "s":
            done = [n for n in numbers if n in plain.held[name]]
            book.settle_ranges(name, 1, done)
            plain.held[name] = [n for n in plain.held[name] if n not in done]
        elif verb == "e":
            kept = plain.held[name][:1] if numbers else []
            book.release_lease(name, 1, kept)
            plain.free.update(n for n in plain.held[name] if n not in kept)
            plain.held[name], seqs[name] = kept, seqs[name] if kept else 0
        else:
            over = set(book.settled) & set(numbers)
            book.undo_ranges(numbers)
            plain.free.update(over if requeue else ())
        assert (book.free, book.leased) == (len(plain.free), sum(map(len, plain.held.values())))
        assert {n: book.held_by(n, 1) for n in "ab"} == {n: tuple(held) for n, held in plain.held.items()}


def row(cluster: str, norm: float, accepted: int = 1) -> PenaltyRow:
    return PenaltyRow(cluster, 1, norm, 0.0, norm, 0, 0, False, accepted)


@given(st.lists(st.tuples(NAMES, st.sampled_from([0.0, 1.0, 1.5, 7.0]), st.integers(0, 1)), min_size=1, max_size=30))
def test_the_median_of_the_others(moves: list[tuple[str, float, int]]) -> None:
    """Of those that have an accepted push with a norm; equal norms are told apart by nobody."""
    norms, rows = LastNorms([]), dict[str, PenaltyRow]()
    for cluster, norm, accepted in moves:
        norms.replace_row(rows.get(cluster), row(cluster, norm, accepted))
        rows[cluster] = row(cluster, norm, accepted)
        for name, known in rows.items():
            others = [r.last_norm for n, r in rows.items() if n != name and r.accepted and r.last_norm]
            assert norms.median_without(known) == (median(others) if others else None)
    assert norms.ordered == LastNorms(rows.values()).ordered


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 2), st.floats(0.0, 6.0), st.booleans()), max_size=50)
)
def test_who_waits_is_found_without_a_look_at_all(asks: list[tuple[str, int, float, bool]]) -> None:
    """Ahead are those that are not late and have an earlier place; a gap of the master makes nobody late."""
    queue, now = SlotQueue(), 0.0
    for cluster, free, waited_s, blind in asks:
        now += waited_s
        if blind:
            queue.shift_times(waited_s)
        expected = [w for n, w in queue.waiters.items() if n != cluster and now <= w.asked_at + w.kept_s]
        known = queue.waiters.get(cluster)
        answer = queue.request_slot(SlotAsk(cluster, 100, 1.0, 0.0), free, 1.0, 60.0, now)
        place = known.place if known else (queue.last_number - MOST_LEAD, queue.last_number, cluster)
        if known or not queue.usual_tokens:
            assert answer.ahead == sum(w.place < place for w in expected)
        assert answer.waiting == 1 + len(expected)
        assert queue.expected == sorted(queue.expected)
        assert {name for *_, name in queue.expected} == set(queue.lateness.at) <= set(queue.waiters)


@pytest.mark.parametrize("slots", [0, 1, 2, 9])
def test_pushes_are_planned_from_behind(slots: int) -> None:
    """The longest ends last; each takes the slot that is free first, as a look at every slot would find it."""
    durations = {"a": 3.0, "b": 5.0, "c": 1.0, "d": 3.0, "e": 0.0}
    ends, expected = [0.0] * max(1, min(slots, len(durations))), {}
    for name in sorted(durations, key=lambda n: (-durations[n], n)):
        slot = ends.index(min(ends))
        expected[name] = ends[slot] = ends[slot] + durations[name]
    assert plan_leads(durations, slots) == expected
