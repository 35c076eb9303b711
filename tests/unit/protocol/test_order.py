"""The order of asking over several transfers: turns without meetings, against brute force and a fluid model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.protocol.order import Lines, Worker, lowest_free, make_lines, places_for_slave, plan_turns, slaves_for_worker

Loads = list[list[float]]  # seconds, worker × slave


def workers_of(loads: Sequence[Sequence[float]], fill: float = 1.0) -> list[Worker]:
    return [Worker(tuple(map(float, row)), fill) for row in loads]


def bound(loads: Loads) -> float:
    """No schedule is shorter than what its busiest worker or slave has to do."""
    return max([sum(row) for row in loads] + [sum(column) for column in zip(*loads, strict=True)])


def planned(workers: Sequence[Worker], slaves: int) -> float:
    """When the plan ends, after a look that nobody meets: each worker in one turn at a time, no link overfull."""
    turns = plan_turns(workers, slaves)
    for turn in turns:
        now = [t for t in turns if t.begin <= turn.begin < t.end - 1e-9]
        assert len({t.worker for t in now}) == len(now)
        assert all(sum(t.share for t in now if t.slave == s) <= 1 + 1e-9 for s in range(slaves))
    assert sorted((t.worker, t.slave) for t in turns) == [
        (w, s) for w, worker in enumerate(workers) for s in range(slaves) if worker.seconds[s] > 0
    ]
    return max((turn.end for turn in turns), default=0.0)


def fewest_turns(pairs: frozenset[tuple[int, int]]) -> int:
    """Brute force: turns of one unit in which no two pairs share a worker or a slave."""

    @cache
    def turns(left: frozenset[tuple[int, int]]) -> int:
        if not left:
            return 0
        most = min(len({w for w, _ in left}), len({s for _, s in left}))
        best = len(left)
        for size in range(most, 0, -1):
            for turn in combinations(sorted(left), size):
                if len({w for w, _ in turn}) == len({s for _, s in turn}) == size:
                    best = min(best, 1 + turns(left - frozenset(turn)))
                    if best <= -(-len(left) // most):
                        return best
        return best

    return turns(pairs)


def test_the_brute_force_knows_its_answer() -> None:
    """A full square needs as many turns as it has slaves; three workers at two slaves need three."""
    assert fewest_turns(frozenset((w, s) for w in range(3) for s in range(3))) == 3
    assert fewest_turns(frozenset((w, s) for w in range(3) for s in range(2))) == 3


@pytest.mark.parametrize("slaves", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_equal_workers_need_no_turn_too_many(workers: int, slaves: int) -> None:
    """Figure 5, more workers than slaves and fewer: as many turns as the busiest has to do (all up to 4 × 4)."""
    loads = [[1.0] * slaves for _ in range(workers)]
    assert planned(workers_of(loads), slaves) == max(workers, slaves)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda s: st.lists(st.lists(st.booleans(), min_size=s, max_size=s), min_size=1, max_size=4)
    )
)
def test_any_pairs_need_as_few_turns_as_brute_force(wanted: list[list[bool]]) -> None:
    """Whoever has something for whom: the fewest turns that any order reaches (reference: brute force up to 4 × 4)."""
    loads = [[float(x) for x in row] for row in wanted]
    pairs = frozenset((w, s) for w, row in enumerate(wanted) for s, x in enumerate(row) if x)
    line = make_lines(workers_of(loads), len(wanted[0]))
    assert all(sorted(row) == list(range(len(wanted))) for row in line)
    if pairs and len(pairs) <= 9:  # more take brute force too long
        assert bound(loads) == fewest_turns(pairs)
    if pairs:
        assert planned(workers_of(loads), len(wanted[0])) == bound(loads)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda s: st.lists(st.lists(st.integers(0, 9), min_size=s, max_size=s), min_size=1, max_size=4)
    )
)
def test_weighted_orders_are_near_the_bound(raw: list[list[int]]) -> None:
    """With unequal bytes a pair is not cut in two, so the bound may be out of reach: never by more than half of it."""
    loads = [[float(x) for x in row] for row in raw]
    if bound(loads):
        assert planned(workers_of(loads), len(raw[0])) <= 1.5 * bound(loads)


def test_slow_workers_share_a_slave() -> None:
    """Workers that fill a third of a link are asked three at a time: six of them take the time of two turns."""
    line = make_lines([Worker((1.0,), 1 / 3)] * 6, 1)
    assert sorted(line[0]) == list(range(6))
    fast_and_slow = [Worker((1.0, 1.0), 1.0), Worker((30.0, 30.0), 1 / 30)]
    assert [row[0] for row in make_lines(fast_and_slow, 2)].count(1) == 1  # the slow one holds nobody up, nor waits


def test_many_workers_walk_a_rotation() -> None:
    """What stands in no plan has its place by a rule: the transpose of the ranks' own order, so still no meetings."""
    slaves, ranks = 8, 3
    for first in range(12):  # of other transfers
        rows = [slaves_for_worker(first + rank, slaves) for rank in range(ranks)]
        for slave in range(slaves):
            places = places_for_slave(slave, slaves, first, ranks)
            assert places == tuple(row.index(slave) for row in rows)
            assert len(set(places)) == ranks


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=30))
def test_transfers_at_once_have_workers_of_their_own(script: list[tuple[bool, int]]) -> None:
    """Whoever ends makes room, and whoever comes takes the lowest that is wide enough: numbers stay small."""
    taken = list[tuple[int, int]]()
    for ends, workers in script:
        if ends and taken:
            taken.pop(workers % len(taken))
            continue
        first = lowest_free(taken, workers)
        taken.append((first, workers))
        numbers = [n for begin, count in taken for n in range(begin, begin + count)]
        assert len(set(numbers)) == len(numbers)
        before = {n for begin, count in taken[:-1] for n in range(begin, begin + count)}
        assert all(before & set(range(lower, lower + workers)) for lower in range(first))


# ---- a push joins: a fluid model of links ----------------------------------------------------------------------------


Pair = tuple[int, int]


def flows_of(left: dict[Pair, float], rate: list[float], link: float, line: Lines) -> dict[Pair, float]:
    """Bytes/s of each pair: a slave asks the first of its line, and one more as long as its link is not full.

    A worker that several slaves ask divides its link among them; a slave divides its own in the order of its line.
    """
    asking = [0] * len(line)  # how far down its line each slave asks
    waiting = [[w for w in row if (w, s) in left] for s, row in enumerate(line)]
    while True:
        asked_by = [sum(w in row[:n] for row, n in zip(waiting, asking, strict=True)) for w in range(len(rate))]
        flows, room = dict[Pair, float](), [link] * len(line)
        for s, row in enumerate(waiting):
            for w in row[: asking[s]]:
                flows[w, s] = min(rate[w] / asked_by[w], room[s])
                room[s] -= flows[w, s]
        hungry = [s for s, row in enumerate(waiting) if asking[s] < len(row) and room[s] > 1e-9]
        if not hungry:
            return {pair: flow for pair, flow in flows.items() if flow > 1e-12}
        asking[min(hungry, key=lambda s: (asking[s], s))] += 1


def fluid(nbytes: Loads, rate: list[float], link: float, line: Lines) -> float:
    """When all is here."""
    left = {(w, s): b for w, row in enumerate(nbytes) for s, b in enumerate(row) if b > 0}
    now = 0.0
    while left:
        flows = flows_of(left, rate, link, line)
        step = min(left[pair] / flow for pair, flow in flows.items())
        now += step
        for pair, flow in flows.items():
            left[pair] -= flow * step
            if left[pair] <= 1e-9:
                del left[pair]
    return now


@pytest.mark.parametrize(
    ("ranks", "slaves"), [((2, 2), 2), ((4, 4), 2), ((2, 2), 4), ((4, 2), 4), ((1, 4), 4), ((3, 2), 2)]
)
@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_a_push_that_joins_half_way_is_done_with_the_first_near_the_optimum(
    ranks: tuple[int, int], slaves: int, slower: float
) -> None:
    """The first push is half through when the second arrives and lines are issued anew: both end within 1.1 × optimum.

    The optimum is what is left over the narrowest place: a slave's link, or a worker's own.
    """
    link, each = 1.0, [1.0 / ranks[0]] * ranks[0] + [1.0 / ranks[1]] * ranks[1]
    rate = [1.0] * ranks[0] + [1.0 / slower] * ranks[1]
    left = [0.5] * ranks[0] + [1.0] * ranks[1]
    nbytes = [[e * l] * slaves for e, l in zip(each, left, strict=True)]
    workers = [Worker(tuple(b / r for b in row), r / link) for row, r in zip(nbytes, rate, strict=True)]
    optimum = max(
        [sum(column) / link for column in zip(*nbytes, strict=True)]
        + [sum(row) / r for row, r in zip(nbytes, rate, strict=True)]
    )
    assert fluid(nbytes, rate, link, make_lines(workers, slaves)) <= 1.1 * optimum


def test_a_worker_does_not_begin_on_the_rest_of_a_link() -> None:
    """It waits for at least half of its own rate: begun on a tenth, it would hold its own link for that long."""
    first, second = plan_turns([Worker((10.0,), 0.9), Worker((1.0,), 0.9)], 1)
    assert (first.worker, second.worker) == (0, 1)
    assert second.begin == pytest.approx(first.end)
    beside = plan_turns([Worker((10.0,), 0.5), Worker((1.0,), 0.9)], 1)
    assert [turn.begin for turn in beside] == [0.0, 0.0], "half of the link is more than half of its rate"
