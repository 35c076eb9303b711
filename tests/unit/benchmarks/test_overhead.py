"""What the benchmarks of the outer loop's cost count as standstill, and how they set it up."""

from __future__ import annotations

import pytest

from benchmarks.overhead import FULL_RUN, QUICK_RUN, WIRE_SHARE, Setting
from benchmarks.pace import rates
from benchmarks.timed_rank import Lengths, Stretch, TimedPlan


@pytest.mark.parametrize("setting", [*FULL_RUN.values(), *QUICK_RUN.values()])
def test_a_link_moves_push_and_pull_in_the_wire_time(setting: Setting) -> None:
    """Bytes of a push and a pull over the line's rate are the given share of the inner time."""
    assert setting.mbit * 1e6 / 8 * setting.wire_s == pytest.approx(2 * 4 * setting.parameters, rel=1e-3)
    assert setting.wire_s == pytest.approx(WIRE_SHARE * setting.inner_s)


def test_standstill_is_what_the_outer_loop_makes_a_round_longer_by() -> None:
    """Calls of `step`, and steps slowed beside a transfer; a machine that is late by itself is none of its business."""
    stretch = Stretch(steps=4, planned_s=2.0, late_s=0.5, slowed_s=0.1, calls=[0.0, 0.0, 0.3])
    assert (stretch.standstill_s, stretch.alone_s) == (pytest.approx(0.4), pytest.approx(2.5))


def test_rates_are_over_the_time_and_over_that_of_the_steps_alone() -> None:
    stretches = [
        Stretch(steps=10, planned_s=1.0, calls=[0.5]),
        Stretch(steps=20, planned_s=1.5, late_s=0.5, calls=[0.5]),
    ]
    assert rates(stretches) == (pytest.approx(7.5), pytest.approx(10.0))


def test_jitter_keeps_its_bounds_and_wanders_slowly() -> None:
    """Steps of one second of training have one length: drawn anew at each step, it would be gone in the mean."""
    lengths = Lengths(TimedPlan(1, 1, 1, step_s=0.1, jitter=0.1), "seed")
    drawn = [lengths.next_s() for _ in range(2000)]
    assert 0.09 <= min(drawn) < 0.092 < 0.108 < max(drawn) <= 0.11
    assert len(set(drawn)) < 300
    assert {Lengths(TimedPlan(1, 1, 1, step_s=0.1), "seed").next_s() for _ in range(3)} == {0.1}
