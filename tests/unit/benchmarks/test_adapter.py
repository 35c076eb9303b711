"""What stands beside the adapter in the simulator, and the model of the crossings."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.adapter import MixedGears, draw_gears, play_papers_ways
from benchmarks.adapter_crossings import (
    MBITS,
    SLOWER,
    STEP_S,
    Judged,
    border_bytes,
    choose_size,
    line_of,
    make_cluster,
    make_slept,
    step_seconds,
)
from benchmarks.harness import Bench
from dips.inside.planning.adapt import slow_ways
from dips.inside.planning.search import Planner, RankedPlan
from dips.inside.planning.simulate import simulate


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 12))])
def test_stages_that_are_all_in_one_gear_play_that_gear(seed: int) -> None:
    """By arrival a pipeline that was put together of one gear's stages takes as long as that gear, at any rates."""
    gears = draw_gears(random.Random(seed))
    count = len(gears[1].stages)
    slow = tuple(random.Random(seed).uniform(1, 8) for _ in range(count - 1))
    ways = {way: factor for b, factor in enumerate(slow) for way in ((b, b + 1), (b + 1, b))}
    for pieces in gears:
        made = MixedGears(gears)._mix((pieces,) * count, (pieces,) * count)
        played = simulate(replace(slow_ways(gears[pieces], ways), by_arrival=True), spans=False)
        assert simulate(slow_ways(made, ways), spans=False).seconds == pytest.approx(played.seconds)


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_each_border_are_no_worse_than_those_of_all(seed: int) -> None:
    """On a trace that does not change, with the same orders: what is best for all stages is among what is tried."""
    gears = draw_gears(random.Random(seed))
    took = play_papers_ways(gears, [[1.0] * 3] * (len(gears[1].stages) - 1), [1] * 3)
    known = "rates known, orders as they come"
    assert took[f"pieces per border, {known}"] <= took[f"gears, {known}"] * (1 + 1e-9)


def test_the_model_that_is_run_is_the_one_that_is_computed_in_other_units() -> None:
    """A step's seconds, the bytes of the parameters over the line and those of a border have the same ratios."""
    size = choose_size()
    whole, slept = Planner(*make_cluster(MBITS[-1], size)), Planner(*make_slept(MBITS[-1] / SLOWER, size))

    def ratios(planner: Planner) -> tuple[float, float]:
        step_s, model = step_seconds(planner), planner.model
        parameters_s = model.parameters * model.parameter_bytes * line_of(planner)
        return parameters_s / step_s, border_bytes(planner) * line_of(planner) / step_s

    assert ratios(slept) == pytest.approx(ratios(whole), rel=1e-4)
    assert step_seconds(slept) == pytest.approx(STEP_S)


def test_a_plan_is_judged_by_its_first_choice_alone() -> None:
    """Of all ways, and of those whose steps are one device's, the first of these; the worst rate is told."""
    ranked = [RankedPlan("EDiT, τ 128", 1.0, 1, exact=False), RankedPlan("HSDP 2 × 2", 2.0, 1)]
    judged, bench = Judged(), Bench("crossings", False, argparse.Namespace(), Console(quiet=True))
    seconds = {"pipeline": 2.0, "FSDP2": 2.2, "EDiT": 2.5, "clusters": 4.0}
    assert judged.add(ranked, seconds) == "EDiT or FSDP2"
    judged.add(ranked, {**seconds, "FSDP2": 1.0, "EDiT": 0.5})
    judged.tell(bench, "run", (1, 2))
    assert [(round(row.value, 6), row.holds) for row in bench.rows] == [
        (1.25, False),
        (1, True),
        (1.1, True),
        (1, True),
    ]
