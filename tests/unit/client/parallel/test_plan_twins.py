"""The plan that looks at each arrangement once is the plan that looks at every parameter of every rank."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dips.client.parallel.plan import Holding, RankLayout, TransferPlan, make_plan
from dips.client.parallel.rect import Rect, box_rects
from dips.errors import ConfigError
from tests.unit.client.parallel.plain_plan import make_plain_plan

SHAPES = ((6, 5), (12,), (4, 3, 2), (2048, 3), (1,), (0, 3))
Held = dict[int, Holding]  # by rank


def cut_dim(shape: tuple[int, ...], dim: int, bounds: list[int], part: int) -> tuple[Rect, ...]:
    """Part `part` of a tensor that is cut along `dim`."""
    starts, sizes = [0] * len(shape), list(shape)
    starts[dim], sizes[dim] = bounds[part], bounds[part + 1] - bounds[part]
    return tuple(box_rects(shape, starts, sizes))


def draw_bounds(rng: random.Random, length: int, parts: int) -> list[int]:
    return [0, *sorted(rng.randint(0, length) for _ in range(parts - 1)), length]


def hold_parameter(rng: random.Random, shape: tuple[int, ...], ranks: list[int]) -> Held:
    """One parameter on these ranks: replicated, sharded along a dim, both, or with its masters elsewhere."""
    whole = tuple(box_rects(shape, [0] * len(shape), shape))
    kind = rng.choice(["replicated", "alone", "sharded", "hybrid", "masters"])
    if kind == "replicated":
        return {rank: Holding(shape, whole, whole) for rank in ranks}
    if kind == "alone":
        owner = rng.choice(ranks)
        return {rank: Holding(shape, whole if rank == owner else (), whole if rank == owner else ()) for rank in ranks}
    if kind == "masters":
        owner = rng.choice(ranks)
        return {rank: Holding(shape, whole if rank == owner else (), whole) for rank in ranks}
    parts = len(ranks) if kind == "sharded" else max(1, len(ranks) // 2)
    dim = rng.randrange(len(shape))
    bounds = draw_bounds(rng, shape[dim], parts)
    shards = [cut_dim(shape, dim, bounds, part) for part in range(parts)]
    return {rank: Holding(shape, shards[i % parts], shards[i % parts]) for i, rank in enumerate(ranks)}


def draw_job(seed: int) -> list[RankLayout]:
    """A job whose parameters share a few arrangements; staged ranks hold some of them."""
    rng = random.Random(seed)
    count = rng.randint(1, 7)
    staged = rng.random() < 0.5
    arrangements = []
    for _ in range(rng.randint(1, 5)):
        some = sorted(rng.sample(range(count), rng.randint(1, count))) if staged else list(range(count))
        arrangements.append(hold_parameter(rng, rng.choice(SHAPES), some))
    names = [f"layers.{rng.randint(0, 3)}.w{i}" for i in range(rng.randint(1, 25))]
    held = {name: rng.choice(arrangements) for name in names}
    hosts = [f"h{rng.randint(0, 2)}" for _ in range(count)]

    def claims(rank: int) -> list[tuple[str, Holding]]:
        order = rng.sample(names, len(names)) if rng.random() < 0.2 else names
        return [(name, held[name][rank]) for name in order if rank in held[name]]

    return [RankLayout.from_claims(claims(rank), hosts[rank], staged) for rank in range(count)]


def outcome(plan: Callable[..., TransferPlan], *args: object) -> TransferPlan | str:
    try:
        return plan(*args)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(150))
def test_both_make_one_plan(seed: int) -> None:
    """For every rank, whoever may move bytes and however finely what is replicated is spread."""
    rng, ranks = random.Random(seed), draw_job(seed)
    most, spread_items = rng.choice([1, 2, 256]), rng.choice([1, 7, 1000, 1 << 20])
    for me in range(len(ranks)):
        expected = outcome(make_plain_plan, ranks, me, most, spread_items)
        assert outcome(make_plan, ranks, me, most, spread_items) == expected, (seed, me)


@pytest.mark.parametrize("seed", range(60))
def test_both_find_the_same_fault(seed: int) -> None:
    """A shape, a name or a shard that is wrong on some rank is reported in the same words."""
    rng, ranks = random.Random(seed), draw_job(seed)
    for _ in range(rng.randint(1, 3)):
        number = rng.randrange(len(ranks))
        claims = list(ranks[number].claims)
        if not claims:
            continue
        at = rng.randrange(len(claims))
        name, holding = claims[at]
        claims[at] = rng.choice(
            [
                (f"{name}x", holding),
                (name, Holding((*holding.shape, 1), holding.reads, holding.writes)),
                (name, Holding(holding.shape, holding.reads[1:], holding.writes)),
                (name, Holding(holding.shape, (*holding.reads, Rect.flat_run(0, 1)), holding.writes)),
            ]
        )
        ranks[number] = RankLayout.from_claims(claims, ranks[number].host, ranks[number].staged)
    for me in range(len(ranks)):
        assert outcome(make_plan, ranks, me, 256, 7) == outcome(make_plain_plan, ranks, me, 256, 7), (seed, me)


def test_loads_count_that_decide_only_through_others() -> None:
    """Rank 6 shares a parameter with 5, 5 one with 4, and so on to 0, who alone moves one more: each moves the next."""
    whole = Holding((4,), (Rect.flat_run(0, 4),), (Rect.flat_run(0, 4),))
    holders = {"p.0.w": (0,), **{f"p.{i + 1}.w": (i, i + 1) for i in range(6)}}
    ranks = [
        RankLayout.from_claims([(name, whole) for name, held in holders.items() if rank in held], "h", staged=True)
        for rank in range(7)
    ]
    plan = make_plan(ranks, 6)
    assert plan == make_plain_plan(ranks, 6)
    assert [piece.layer for piece in plan.pieces] == [6]
