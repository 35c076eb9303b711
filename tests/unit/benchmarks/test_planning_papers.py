"""What stands between published figures and ours: curves, groups, ZeRO-3, and what is read of Metis' plans."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks import planning
from benchmarks.harness import Bench
from benchmarks.planning import read_inventory, zorse_planner
from benchmarks.planning_metis import PLAN, _read_plan
from benchmarks.planning_papers import find_crossing, gather_always, predict_table_6, zorse_groups
from dips.inside.planning.profile import parse_profile
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.search import PipelineChoice, Planner


def test_a_curve_meets_a_value_on_logarithmic_axes() -> None:
    """Halfway in logarithms between two points; nowhere if it is never reached."""
    assert find_crossing([1.0, 100.0], [16.0, 1.0], 4.0) == pytest.approx(10.0)
    assert find_crossing([1.0, 10.0, 100.0], [9.0, 3.0, 1.0], 3.0) == pytest.approx(10.0)
    assert find_crossing([1.0, 10.0], [9.0, 3.0], 2.0) is None


@pytest.mark.parametrize(
    ("cluster", "sizes"), [("a", [2, 2, 8, 8]), ("b", [8, 16, 16, 24]), ("c", [16, 24, 24, 8, 8, 24, 24])]
)
def test_zorses_groups_are_those_of_its_text(cluster: str, sizes: list[int]) -> None:
    """§6.2: nodes on A, kinds on B; on C all A10Gs, V100s and each region's T4s in halves."""
    profile = parse_profile(read_inventory(f"zorse-{cluster}"), cluster)
    assert [len(group) for group in zorse_groups(profile, cluster)] == sizes


def test_zero_3_waits_for_its_gathers_and_holds_two_layers() -> None:
    """A forward takes at least its stage's gather; what does not fit with two layers gathered is no pipeline."""
    planner = zorse_planner("a", "llama-7b")
    groups = zorse_groups(planner.profile, "a")
    cuts = planner.cut_layers(groups, 1, 1)
    assert cuts is not None
    choice = PipelineChoice(ScheduleName.BREADTH_FIRST, groups, cuts, 1)
    pipeline = planner.make_pipeline(choice)
    slowed = gather_always(planner, choice, pipeline)
    assert slowed is not None
    for before, after in zip(pipeline.stages, slowed.stages, strict=True):
        assert not after.gather_s
        assert after.devices[0].seconds[0].f == max(before.devices[0].seconds[0].f, before.gather_s[0])
    small = {name: replace(kind, memory_gb=8) for name, kind in planner.profile.kinds.items()}
    assert gather_always(Planner(replace(planner.profile, kinds=small), planner.model), choice, pipeline) is None


def test_all_numbers_of_table_6_are_predicted() -> None:
    """Three kinds of disturbance, three methods, five strengths."""
    assert [[len(row) for row in rows] for rows in predict_table_6().values()] == [[5, 5, 5]] * 3


def test_a_plan_of_metis_is_read() -> None:
    """Devices are counted kind by kind in the order of the plan; other lines are none."""
    planner = zorse_planner("a", "llama-7b")
    line = "3, 12.5, (<DeviceType.V100: 'v100'>, <DeviceType.A100: 'a100'>), [16, 4], [(16, 1), (4, 1)], 8, [0, 30, 34]"
    found = PLAN.match(line)
    assert found is not None
    plan = _read_plan(planner, {"H100-NVL": "A100", "A100-80": "V100"}, found)
    assert [(len(group), group[0]) for group in plan.groups] == [(16, "a100-0.0"), (4, "h100-0.0")]
    assert plan.cuts == (0, 30, 34)
    assert PLAN.match("rank, cost, node_sequence, device_groups") is None


def test_groups_are_of_the_same_claim_whatever_else_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table would have kept the claim of a search among others, which may hold no longer, beside that of now."""
    monkeypatch.setattr(planning, "zorse_planner", lambda *_: SimpleNamespace(profile=None, speed_of=None))
    claims = []
    for candidates in ([], [SimpleNamespace(groups=["a"])]):
        monkeypatch.setattr(planning, "list_groupings", lambda *_, found=candidates: found)
        bench = Bench("planning", False, argparse.Namespace(), Console(quiet=True))
        planning.hold_groups(bench)
        claims.append([(row.name, row.against) for row in bench.rows])
    assert claims[0] == claims[1] and claims[0]
