"""A gap of the master moves no meeting: the clusters kept working, and their grid stays where it is."""

from __future__ import annotations

import pytest

from dips.protocol.alignment import Alignment, WindowTiming
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.heartbeats import ClusterHeartbeat

PERIOD_S = 6.4  # 64 steps of 0.1 s


def heartbeat(since_push: int) -> ClusterHeartbeat:
    return ClusterHeartbeat(
        "a", 1, TrainerState.TRAINING, Activity.INNER, 1, 0, 0, 0, 0.0, None, 0, 0, 0.0, 64, 0.1, since_push
    )


def test_a_push_of_the_fewest_steps_joins_a_window_that_has_just_begun() -> None:
    """One that has taken a step fewer waits for the next, though it worked as long since its last push."""
    window_s = PERIOD_S
    alignment, timing = Alignment(), WindowTiming(window_s, 2, 0)
    alignment.record_heartbeat(heartbeat(0))
    alignment.push_in_s("a", timing, window_s)
    alignment.period_s = 1.0
    now = window_s + 0.1
    alignment.record_heartbeat(heartbeat(8))
    assert alignment.push_in_s("a", timing, now) == 0.0
    alignment.record_heartbeat(heartbeat(7))
    assert alignment.push_in_s("a", timing, now) == pytest.approx(0.9)


@pytest.mark.parametrize("gap_s", [1.0, PERIOD_S, 10.0, 1000.0])
def test_the_grid_is_the_same_after_a_gap(gap_s: float) -> None:
    """Whoever worked on meets at the next point of the grid that was announced before."""
    alignment, timing = Alignment(), WindowTiming(None, 2, 0)
    alignment.record_heartbeat(heartbeat(0))
    first_s = alignment.push_in_s("a", timing, 0.0)
    assert first_s == pytest.approx(PERIOD_S)
    alignment.record_heartbeat(heartbeat(16))
    meets_at = gap_s + alignment.push_in_s("a", timing, gap_s)
    periods = (meets_at - first_s) / PERIOD_S
    assert periods == pytest.approx(round(periods), abs=1e-6)
    assert 0 <= meets_at - gap_s <= PERIOD_S + 1e-6


@pytest.mark.parametrize(("steps", "due_s"), [(32, 0.0), (31, 5.9)])
def test_who_has_worked_for_half_a_period_joins_the_window_that_has_just_opened(steps: int, due_s: float) -> None:
    """Whoever has worked less took part in it, and pushes for the next."""
    alignment, timing = Alignment(), WindowTiming(None, 2, 0)
    alignment.record_heartbeat(heartbeat(0))
    alignment.push_in_s("a", timing, 0.0)
    alignment.record_heartbeat(heartbeat(steps))
    assert alignment.push_in_s("a", timing, PERIOD_S + 0.5) == pytest.approx(due_s)
