"""When a cluster pushes, for each pace, on a clock that the test holds."""

from __future__ import annotations

import pytest

from dips.client.agent.account import BELIEVED_S, LOOK_S, MOST_TIMES, Pace
from dips.protocol.heartbeats import OWN_PACE


def train(pace: Pace, now: float, step_s: float, most: int = 10_000) -> tuple[float, int]:
    """Take inner steps, and look when told to, until a push is due; return when that is, and how often was looked."""
    look_in, looks = 1, 0
    for _ in range(most):
        now += step_s
        pace.record_step(now)
        look_in -= 1
        if look_in <= 0:
            look_in, looks = pace.look_in(now), looks + 1
            if look_in == 0:
                return now, looks
    raise AssertionError("no push became due")


def test_steps_count_and_are_looked_at_once() -> None:
    """Every H inner steps, and the ranks do not talk in between."""
    pace = Pace(steps=64)
    pace.restart_count(0.0)
    assert pace.look_in(0.0) == 64
    train(pace, 0.0, 0.1)
    assert pace.since_push == 64
    pace.restart_count(6.4)
    assert pace.look_in(6.4) == 64


@pytest.mark.parametrize("step_s", [0.05, 0.7, 3.0])
def test_seconds_end_at_the_nearest_boundary(step_s: float) -> None:
    """A push is due at the boundary nearest to the moment, and a look every few seconds finds it."""
    pace = Pace(seconds=60.0)
    pace.restart_count(100.0)
    due, looks = train(pace, 100.0, step_s)
    assert abs(due - 160.0) <= step_s * 0.51 + 1e-6
    assert looks <= 60.0 / LOOK_S + 12


def test_seconds_survive_a_change_of_speed() -> None:
    """Steps that become slower half-way cost looks, not a late push."""
    pace = Pace(seconds=60.0)
    pace.restart_count(0.0)
    now, look_in = 0.0, 1
    while True:
        now += 0.1 if now < 30 else 0.5
        pace.record_step(now)
        look_in -= 1
        if look_in <= 0 and (look_in := pace.look_in(now)) == 0:
            break
    assert abs(now - 60.0) < 6.0


def test_one_step_longer_than_the_period_still_counts() -> None:
    """No push without an inner step."""
    pace = Pace(seconds=1.0)
    pace.restart_count(0.0)
    assert pace.look_in(5.0) == 1
    pace.record_step(6.0)
    assert pace.look_in(6.0) == 0


def test_aligned_follows_the_meeting() -> None:
    """H follows from what the master says, and a meeting that moves is followed within a look."""
    pace = Pace(aligned=64)
    pace.restart_count(0.0)
    for i in range(8):
        pace.record_step(0.1 * (i + 1))
    pace.set_meeting(9.2, 0.8)
    assert pace.look_in(0.8) == int(LOOK_S / pace.step_s)
    due, _ = train(pace, 0.8, 0.1)
    assert abs(due - 10.0) < 0.11


def test_aligned_without_a_master_keeps_its_own_h() -> None:
    """A master that says nothing, or is gone for long, costs the alignment and no push."""
    pace = Pace(aligned=20)
    pace.restart_count(0.0)
    pace.set_meeting(OWN_PACE, 0.0)
    train(pace, 0.0, 0.1)
    assert pace.since_push == 20
    pace.restart_count(2.0)
    pace.set_meeting(1000.0, 2.0)
    due, _ = train(pace, 2.0, 0.5)
    assert 30.0 < due < 40.0, "what was said once does not hold for ever"


def test_aligned_is_bounded() -> None:
    """A meeting that never comes nearer does not keep a cluster from pushing."""
    pace = Pace(aligned=4)
    pace.restart_count(0.0)
    now = 0.0
    for _ in range(4 * MOST_TIMES):
        now += 0.1
        pace.record_step(now)
        pace.set_meeting(100.0, now)
    assert pace.look_in(now) == 0


def test_standing_still_is_not_speed() -> None:
    """The time of a transfer does not count as an inner step's."""
    pace = Pace(seconds=10.0)
    pace.record_step(1.0)
    pace.record_step(1.5)
    pace.pause_timing()
    pace.record_step(50.0)
    pace.record_step(50.5)
    assert pace.step_s == pytest.approx(0.5)


def test_a_few_fast_steps_are_not_believed_for_long() -> None:
    """Three steps of 0.2 ms, then steps of 10 ms: without a bound the next look would come after 2,500 of them."""
    pace = Pace(steps=64)
    assert pace.steps_until_ask == 1, "before the first"
    for k in range(4):
        pace.record_step(k * 0.0002)
    assert pace.steps_until_ask == 24
    for k in range(40):
        pace.record_step(1.0 + k * 0.0002)
    assert pace.steps_until_ask == 264
    for k in range(40):
        pace.record_step(2.0 + k * 0.01)
    assert pace.steps_until_ask == 50


def test_steps_that_are_told_together_are_timed_apart() -> None:
    """As if each had been told; also after a standstill, and whatever a rank claims of its clock."""
    pace = Pace(steps=64)
    pace.restart_count(0.0)
    pace.record_step(1.009, 10, 0.009)
    assert (pace.since_push, pace.first_step_s) == (10, pytest.approx(1.0)), "how long it took to begin is unknown"
    assert pace.step_s == pytest.approx(0.001) and pace.steps_until_ask == 8 * 9
    pace.record_step(1.029, 10, 0.018)
    pace.record_step(1.049, 10, 0.018)
    assert (pace.since_push, pace.step_s) == (30, pytest.approx(0.002))
    for ended, span_s in ((0.5, 7.0), (1.06, -3.0), (1.07, float("nan"))):
        pace.record_step(ended, 1_000_000, span_s)
        assert 0.0 <= pace.step_s < 0.01


def test_how_many_steps_a_round_has() -> None:
    """The own H; of seconds, as many as the median step fits into them, 0 while none was seen."""
    assert (Pace(steps=64).round_steps, Pace(aligned=12).round_steps) == (64, 12)
    assert (Pace(steps=64).aligned_steps, Pace(aligned=12).aligned_steps) == (0, 12)
    for steps, expected in ((20, 12), (5, 5)):  # the meetings decide: as many as in the last round, and no more than H
        met = Pace(aligned=12)
        met.record_step(0.0, steps)
        met.restart_count(2.0)
        met.restart_count(2.0)
        assert met.round_steps == expected
    pace = Pace(seconds=60.0)
    assert pace.round_steps == 0
    for n in range(4):
        pace.record_step(100.0 + 0.5 * n)
    assert pace.round_steps == 120


def test_the_wait_between_two_pushes_is_no_step() -> None:
    """The first step after a push or a start is not measured: it would include what came between."""
    pace = Pace(steps=64)
    pace.record_step(1.0)
    pace.record_step(1.5)
    pace.restart_count(1.5)
    pace.record_step(60.0)
    assert pace.step_s == 0.5


def test_the_nearest_boundary_and_the_last_moment_of_a_meeting() -> None:
    """Due now: push. Half a step left: take it, since the next boundary is as near. Believed to the last moment."""
    pace = Pace(aligned=2)
    pace.restart_count(0.0)
    pace.record_step(1.0)
    pace.set_meeting(0.0, 1.0)
    assert pace.look_in(1.0) == 0, "also while no step's length is known"
    pace.record_step(2.0)
    pace.set_meeting(0.5, 2.0)
    assert pace.look_in(2.0) == 1
    pace.set_meeting(1000.0, 2.0)
    assert pace.look_in(2.0 + BELIEVED_S) > 0 == pace.look_in(2.1 + BELIEVED_S)


def test_a_meeting_is_believed_for_as_long_as_the_agents_lease() -> None:
    """With heartbeats every 60 s the next word comes after BELIEVED_S: the cluster must not go by itself until then."""
    pace = Pace(aligned=2)
    pace.restart_count(0.0)
    pace.record_step(1.0)
    pace.record_step(2.0)
    pace.set_meeting(1000.0, 2.0, believed_s=300.0)
    assert pace.look_in(302.0) > 0 == pace.look_in(303.0)
