"""Every rank knows every rank's layout, whatever they hold and however little of it travels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.large_model import large_shapes
from dips.client.parallel.plan import Holding, RankLayout, gather_layouts
from dips.client.parallel.rect import box_rects
from tests.unit.client.parallel.test_plan_twins import draw_job


class ThreadCollectives:
    """All-gather among threads, one for each rank; counts what a rank receives."""

    def __init__(self, rank: int, slots: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self._slots, self._barrier = rank, slots, barrier
        self.received = 0

    def all_gather(self, message: bytes) -> list[bytes]:
        self._slots[self.rank] = message
        self._barrier.wait(10)
        gathered = list(self._slots)
        self._barrier.wait(10)
        self.received += sum(map(len, gathered))
        return gathered


def gathered(
    ranks: list[RankLayout], problem: Callable[[int], str] = lambda _: ""
) -> tuple[list[tuple[list[RankLayout], list[str]]], int]:
    """What each rank knows afterwards, and how many bytes one received."""
    slots, barrier = [b""] * len(ranks), threading.Barrier(len(ranks))
    collectives = [ThreadCollectives(rank, slots, barrier) for rank in range(len(ranks))]
    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(lambda c: gather_layouts(ranks[c.rank], problem(c.rank), c), collectives))
    return found, collectives[0].received


@pytest.mark.parametrize("seed", range(20))
def test_what_is_told_is_what_is_known(seed: int) -> None:
    """Equal lists and others, staged and not, ranks without any parameter."""
    ranks = draw_job(seed)
    for known, problems in gathered(ranks)[0]:
        assert known == ranks and not any(problems)


def test_one_rank_with_a_problem_is_heard_by_all() -> None:
    """Nobody waits for the lists of names of a job that will not be."""
    ranks = draw_job(3) + draw_job(4)
    for known, problems in gathered(ranks, lambda rank: "no adapter" if rank == 1 else "")[0]:
        assert known == [] and [bool(p) for p in problems] == [rank == 1 for rank in range(len(ranks))]


def test_a_large_model_takes_little() -> None:
    """50,000 parameters on 4 ranks: names do not travel if all hold the same, and once for each list otherwise."""

    def layout(rank: int, names: list[tuple[str, tuple[int, ...]]]) -> RankLayout:
        rects = {shape: tuple(box_rects(shape, (0,) * len(shape), shape)) for _, shape in names}
        return RankLayout.from_claims([(n, Holding(s, rects[s], rects[s])) for n, s in names], "h", staged=True)

    shapes = list(large_shapes())
    same = [layout(rank, shapes) for rank in range(4)]
    stages = [layout(rank, shapes[rank % 2 :: 2]) for rank in range(4)]
    assert gathered(same)[1] < 20_000
    assert gathered(stages)[1] < 400_000
