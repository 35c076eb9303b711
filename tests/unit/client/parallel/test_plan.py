"""Rectangles and plans against simple references: arrays of indices, and a job's memory moved element by element."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.client.parallel.plan import Holding, LocalRect, RankLayout, TransferPlan, make_plan
from dips.client.parallel.rect import Rect, box_rects, cut_flat
from dips.errors import ConfigError

SHAPE = (6, 5)


def elements(rect: Rect) -> list[int]:
    return [rect.first + row * rect.width + col for row in range(rect.rows) for col in range(rect.cols)]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    starts = tuple(draw(st.integers(0, dim - 1)) for dim in shape)
    return shape, starts, tuple(draw(st.integers(0, dim - start)) for dim, start in zip(shape, starts, strict=True))


def indices(shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    full = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return full[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))].reshape(-1).tolist()


@given(boxes())
def test_rectangles_of_a_box_are_its_elements_in_the_order_of_its_memory(box: tuple[tuple[int, ...], ...]) -> None:
    """Whatever dims are cut, numpy's own indexing agrees."""
    assert [e for rect in box_rects(*box) for e in elements(rect)] == indices(*box)


@given(boxes(), st.integers(0, 300), st.integers(0, 300))
def test_what_lies_within_a_range(box: tuple[tuple[int, ...], ...], begin: int, end: int) -> None:
    """Cutting a rectangle by a range of the parameter loses and adds nothing."""
    for rect in box_rects(*box):
        found = [e for part in rect.cut_between(begin, end) for e in elements(part)]
        assert found == [e for e in elements(rect) if begin <= e < end]
        for part in rect.cut_between(begin, end):
            row, col = rect.place_of(part)
            assert elements(rect)[row * rect.cols + col] == part.first


@given(boxes(), st.integers(0, 300), st.integers(0, 300))
def test_what_lies_in_a_range_of_the_memory(box: tuple[tuple[int, ...], ...], begin: int, end: int) -> None:
    """A distributed optimizer cuts the memory of a shard, not the parameter."""
    parts = box_rects(*box)
    cut = [(index, e) for index, piece in cut_flat(parts, begin, end) for e in elements(piece)]
    assert (
        cut == [(i, e) for i, rect in enumerate(parts) for e in elements(rect)][begin:end] if begin < end else not cut
    )


parts_of_a_weight = st.builds(
    lambda row, rows, col, cols: Rect.make_canonical(row * 5 + col, min(rows, 6 - row), min(cols, 5 - col), 5),
    st.integers(0, 5), st.integers(1, 6), st.integers(0, 4), st.integers(1, 5),
)  # fmt: skip


@given(parts_of_a_weight, parts_of_a_weight)
def test_two_rectangles_meet_if_they_share_an_element(a: Rect, b: Rect) -> None:
    """Also where one is a run that wraps around rows."""
    assert a.overlaps_with(b) == b.overlaps_with(a) == bool(set(elements(a)) & set(elements(b)))


def job(kind: str) -> list[RankLayout]:
    """Six ranks on two hosts that hold a 6 × 5 weight and a norm of 5 in one way or another."""
    ways = {
        "replicated": [[(0, 6, 0, 5)]] * 6,
        "rows": [[(r, r + 1, 0, 5)] for r in range(6)],
        "columns": [[(0, 6, c, min(c + 1, 5))] for c in range(6)],
        "uneven": [[(0, 4, 0, 5)], [(4, 6, 0, 5)], [], [], [], []],
        "grid": [[(r, r + 2, c, c + w)] for r in (0, 2, 4) for c, w in ((0, 3), (3, 2))],
        "grid, replicated": [[(r, r + 3, c, c + w)] for r in (0, 3) for c, w in ((0, 3), (3, 2))]
        + [[(0, 3, 0, 3)], []],
        "interleaved": [[(0, 2, 0, 5), (4, 5, 0, 5)], [(2, 4, 0, 5), (5, 6, 0, 5)], [], [], [], []],
    }
    ranks = []
    for number, held in enumerate(ways[kind]):
        parts = tuple(rect for a, b, c, d in held for rect in box_rects(SHAPE, (a, c), (b - a, d - c)))
        norm = (Rect.flat_run(0, 5),)
        held_here = [("layers.0.w", Holding(SHAPE, parts, parts)), ("norm.g", Holding((5,), norm, norm))]
        ranks.append(RankLayout.from_claims(held_here, f"host{number // 3}"))
    return ranks


def memory_of(rank: RankLayout, theta: dict[str, np.ndarray]) -> dict[tuple[str, int], np.ndarray]:
    """The blocks of one rank, filled from full parameters."""
    return {(name, b): theta[name][elements(rect)] for name, c in rank.claims for b, rect in enumerate(c.writes)}


def move(
    plans: list[TransferPlan], ranks: list[RankLayout], which: str, source: list[dict], target: list[dict]
) -> None:
    """Carry out all exchanges of a job: the n-th rectangle that is sent is the n-th that is received."""
    names = [[p.name for p in layer.parameters] for layer in plans[0].manifest.layers]

    def key(plan: TransferPlan, layer: int, end: LocalRect, piece: bool) -> tuple[tuple, list[int]]:
        if piece:
            return (end.index,), [e - plan.pieces[end.index].offset for e in elements(end.rect)]
        name = names[layer][end.param]
        rank = ranks[plans.index(plan)]
        claim = next(c for other, c in rank.claims if other == name)
        place = {e: i for i, e in enumerate(elements(claim.writes[end.index]))}
        return (name, end.index), [place[e] for e in elements(end.rect)]

    spread = which == "spread"
    for layer in range(len(names)):
        for me, plan in enumerate(plans):
            moves = getattr(plan, which)[layer]
            pairs = [(me, a, b) for a, b in moves.local]
            for peer, ends in moves.sends.items():
                pairs += [
                    (peer, a, b) for a, b in zip(ends, getattr(plans[peer], which)[layer].receives[me], strict=True)
                ]
            for peer, a, b in pairs:
                from_key, from_at = key(plan, layer, a, spread)
                to_key, to_at = key(plans[peer], layer, b, not spread)
                target[peer][to_key][to_at] = source[me][from_key][from_at]


KINDS = ["replicated", "rows", "columns", "uneven", "grid", "grid, replicated", "interleaved"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("movers", [1, 2, 6])
@pytest.mark.parametrize("spread_items", [1, 7, 1000])
def test_pieces_cover_the_model_once_and_every_exchange_arrives(kind: str, movers: int, spread_items: int) -> None:
    """Six ranks move θ out of their blocks and into them again, whoever may speak and however finely it is spread."""
    ranks = job(kind)
    plans = [make_plan(ranks, me, movers, spread_items) for me in range(6)]
    theta = {"layers.0.w": np.arange(30.0), "norm.g": np.arange(100.0, 105.0)}
    blocks = [memory_of(rank, theta) for rank in ranks]
    pieces: list[dict] = [{(n,): np.full(p.length, np.nan) for n, p in enumerate(plan.pieces)} for plan in plans]
    move(plans, ranks, "gather", blocks, pieces)
    seen = {name: np.zeros(array.size, int) for name, array in theta.items()}
    for plan, mine in zip(plans, pieces, strict=True):
        for number, (layer, param, offset, length) in enumerate(plan.pieces):
            name = plan.manifest.layers[layer].parameters[param].name
            seen[name][offset : offset + length] += 1
            assert np.array_equal(mine[(number,)], theta[name][offset : offset + length]), (kind, name)
    assert all((count == 1).all() for count in seen.values())
    assert sum(bool(plan.pieces) for plan in plans) <= movers
    empty = [{key: np.full(values.shape, np.nan) for key, values in mine.items()} for mine in blocks]
    move(plans, ranks, "spread", pieces, empty)
    assert all(np.array_equal(empty[r][key], blocks[r][key]) for r in range(6) for key in blocks[r])


def test_what_one_rank_holds_alone_does_not_travel_inside_the_cluster() -> None:
    """Shards along the first dim, even or not, go straight to the slaves."""
    for kind in ("rows", "uneven", "interleaved"):
        for me in range(6):
            plan = make_plan(job(kind), me)
            assert not any(moves.sends or moves.receives for moves in (plan.gather[0], plan.spread[0])), kind


def test_replicas_share_the_load() -> None:
    """Each of six replicas moves a sixth of what all hold, within one cut."""
    shape = (6 * 4096,)
    whole = Holding(shape, (Rect.flat_run(0, shape[0]),), (Rect.flat_run(0, shape[0]),))
    ranks = [RankLayout.from_claims([(f"layers.{i}.w", whole) for i in range(4)], "host")] * 6
    loads = [sum(p.length for p in make_plan(ranks, me, spread_items=1024).pieces) for me in range(6)]
    assert max(loads) - min(loads) <= 1024 and sum(loads) == 4 * shape[0]


def test_transfer_ranks_are_spread_over_the_hosts() -> None:
    """Two of six may speak: one on each host, so nobody moves its ranges to another host."""
    ranks = job("rows")
    plans = [make_plan(ranks, me, max_transfer_ranks=2) for me in range(6)]
    assert [bool(plan.pieces) for plan in plans] == [True, False, False, True, False, False]
    for me, plan in enumerate(plans):
        for peer in plan.gather[0].sends:
            assert ranks[peer].host == ranks[me].host


def claims(*held: tuple[Rect, ...], shape: tuple[int, ...] = SHAPE) -> list[RankLayout]:
    return [RankLayout.from_claims([("w", Holding(shape, parts, parts))], "host") for parts in held]


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([(Rect.flat_run(0, 10),), (Rect.flat_run(20, 10),)], "w: elements 10 to 20 are held by no rank"),
        ([(Rect.flat_run(0, 10),)], "w: elements 10 to 30 are held by no rank"),
        ([(Rect.flat_run(0, 20),), (Rect.flat_run(10, 20),)], "w: ranks hold shards that overlap without being equal"),
        (
            [(Rect.make_canonical(0, 6, 2, 5),), (Rect.make_canonical(3, 6, 2, 5),)],
            "w: not all of its elements 0 to 30 are held by a rank",
        ),
        (
            [(Rect.make_canonical(0, 6, 2, 5),), (Rect.make_canonical(2, 3, 2, 10), Rect.make_canonical(7, 3, 3, 10))],
            "w: ranks hold it cut along different",
        ),
    ],
)
def test_what_is_held_by_nobody_or_twice_is_named(held: list[tuple[Rect, ...]], words: str) -> None:
    """The error is made from what all ranks said, so all ranks raise it."""
    messages = set()
    for me in range(len(held)):
        with pytest.raises(ConfigError) as raised:
            make_plan(claims(*held), me)
        messages.add(str(raised.value))
    assert len(messages) == 1 and messages.pop().startswith(words)


def test_ranks_that_hold_other_shapes_or_parameters_are_named() -> None:
    """At most five differences, then how many more; stages may hold other parameters than their neighbours."""
    whole = (Rect.flat_run(0, 2),)
    many = RankLayout.from_claims([(f"l.{i}.w", Holding((2,), whole, whole)) for i in range(9)], "host")
    few = RankLayout.from_claims([("l.0.w", Holding((2, 1), whole, whole))], "host")
    with pytest.raises(ConfigError, match=r"l\.0\.w: shape \(2,\) on rank 0, \(2, 1\) on rank 1.*and 4 more"):
        make_plan([many, few], 0)
    stages = [
        RankLayout.from_claims([(f"l.{i}.w", Holding((2,), whole, whole))], "host", staged=True) for i in range(2)
    ]
    assert [len(make_plan(stages, me).pieces) for me in range(2)] == [1, 1]


def test_a_large_job_is_planned_in_seconds() -> None:
    """256 ranks of HSDP with 200 parameters: every rank plans for itself, and in the same way."""
    rng = random.Random(1)
    cuts = [sorted(rng.sample(range(1, 4096), 31)) for _ in range(200)]
    shares = [[Rect.flat_run(a, b - a) for a, b in pairwise([0, *cut, 4096])] for cut in cuts]
    ranks = [
        RankLayout.from_claims(
            [(f"l.{i}.w", Holding((4096,), (share[r % 32],), (share[r % 32],))) for i, share in enumerate(shares)],
            f"h{r // 8}",
        )
        for r in range(256)
    ]
    plans = [make_plan(ranks, me) for me in (0, 255)]
    assert all(plan.pieces for plan in plans)
