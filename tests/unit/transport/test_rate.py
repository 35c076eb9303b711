"""Rate: what a transfer moves now, not what it moved in its incarnation."""

from __future__ import annotations

import math
from collections import deque

import pytest

from dips.protocol.heartbeats import LEAST_BYTES_PER_S, Transfer, remaining_s
from dips.transport.intake import HORIZON_S, STEP_S, Rate


def test_a_rate_follows_the_last_seconds():
    """After a slow minute the fast seconds count alone."""
    rate, moved, now = Rate(0.0), 0, 0.0
    assert rate.bytes_per_s == 0
    for step, speed in ((600, 10), (100, 1000)):
        for _ in range(step):
            now, moved = now + 0.1, moved + speed
            rate.record_bytes(moved, now)
    assert rate.bytes_per_s == pytest.approx(10_000, rel=0.01)


def test_silence_brings_the_rate_to_nothing():
    """A transfer that stands shows so, within the horizon."""
    rate = Rate(0.0)
    rate.record_bytes(1000, 1.0)
    for k in range(1, 40):
        rate.record_bytes(1000, 1.0 + k * HORIZON_S / 20)
    assert rate.bytes_per_s == 0


def test_a_sample_is_kept_for_a_step_and_counts_for_the_horizon():
    """To the moment: one that is a step later does not take its place, one that is a horizon old is the first."""
    rate = Rate(0.0)
    rate.record_bytes(10, STEP_S / 2)
    rate.record_bytes(20, STEP_S)
    rate.record_bytes(30, STEP_S + STEP_S / 4)
    assert rate._samples == deque([(0.0, 0), (STEP_S / 2, 10), (STEP_S + STEP_S / 4, 30)])
    rate = Rate(0.0)
    rate.record_bytes(10, 1.0)
    rate.record_bytes(20, 1.0 + HORIZON_S)
    assert rate.bytes_per_s == 10 / HORIZON_S


def test_samples_are_few():
    """However often it is shown: the horizon over the step, and one."""
    rate = Rate(0.0)
    for k in range(100_000):
        rate.record_bytes(k, k * 0.001)
    assert len(rate._samples) <= HORIZON_S / 0.2 + 3


def test_what_remains():
    """Nothing when it is whole, for ever while nothing moves."""
    assert remaining_s(10, 10, 0.0) == 0
    assert remaining_s(4, 10, 2.0) == 3
    assert remaining_s(4, 10, 0.0) == math.inf
    assert remaining_s(0, 10, LEAST_BYTES_PER_S) == 10 / LEAST_BYTES_PER_S
    assert Transfer("fast", 1, 1, True, 4, 10, 2.0).remaining_s == 3
