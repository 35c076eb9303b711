"""What `benchmarks pipeline --part setting1` and `--part looped` compare."""

from __future__ import annotations

import pytest

from benchmarks.pipeline_anchors import (
    BORDERS,
    LAYER_S,
    LAYERS,
    MICROBATCHES,
    SAMPLES,
    SITES,
    choose_plan,
    group_equally,
    make_looped_jobs,
    make_sites_jobs,
    plan_sites,
)


@pytest.mark.parametrize("border", BORDERS)
def test_the_sites_are_those_of_setting_1(border: float) -> None:
    """A transfer from the cloud takes so many forwards of a stage, a tenth of that between the others, and the plan is
    simulated to be the fastest.
    """
    planner = plan_sites(border)
    nbytes = SAMPLES * planner.layers[0].border_bytes
    slow, fast = (nbytes * planner.profile.route(*way).byte_s for way in (("cloud.0", "edge.0"), ("edge.0", "end.0")))
    assert slow == pytest.approx(border * LAYERS * LAYER_S / len(SITES), rel=0.01) and slow == pytest.approx(10 * fast)
    choice, seconds = choose_plan(planner)
    assert seconds["plan"] == min(seconds.values())
    jobs = make_sites_jobs(planner, choice)
    assert [job.device for job in jobs] == ["cloud.0", "edge.0", "end.0"]
    assert [job.seconds[0][0] for job in jobs] == pytest.approx([LAYER_S * 82.58 / v for v in SITES.values()])
    assert all(job.rows * 32 * SAMPLES == nbytes and job.microbatches == MICROBATCHES for job in jobs)


@pytest.mark.parametrize("ministages", [1, 2, 4, 8])
def test_equal_groups_have_the_same_layers(ministages: int) -> None:
    """Two stages of two devices: each holds half of the layers, in so many parts."""
    pipeline, played = group_equally(ministages)
    jobs = make_looped_jobs(pipeline, played, ministages)
    assert len(jobs) == 4 and all(len(job.cuts) - 1 == 2 * ministages for job in jobs)
    assert {len(job.seconds) for job in jobs} == {jobs[0].cuts[-1]}
