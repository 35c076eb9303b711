"""Deadlines from size and bandwidth, and the bandwidth that they are made of (docs/rationale.md#19, #31)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.protocol.enums import Activity, TrainerState
from dips.protocol.events import BandwidthMeasured
from dips.protocol.heartbeats import ClusterHeartbeat
from dips.protocol.membership import Judge
from dips.protocol.options import TimingOptions
from dips.protocol.round import LATE_SHARE
from dips.protocol.transfer_book import Bandwidth, too_slow, transfer_deadline_s

TIMING = TimingOptions(transfer_s=1000.0, least_transfer_s=10.0, min_push_bps=8e6)


@pytest.mark.parametrize(
    ("nbytes", "bytes_per_s", "expected"),
    [
        (100, None, 1000.0),  # never measured
        (100, 0.0, 1000.0),
        (100, 10.0, 30.0),  # three times its bytes over the bandwidth
        (100, 1e9, 10.0),  # at least
        (100, 0.01, 30_000.0),  # however long: it is counted from the last byte
    ],
)
def test_a_deadline_is_three_times_bytes_over_bandwidth(nbytes: int, bytes_per_s: float, expected: float) -> None:
    """3 × bytes / bandwidth, at least least_transfer_s; transfer_s while nothing is known."""
    assert transfer_deadline_s(nbytes, bytes_per_s, TIMING) == expected


@given(st.integers(0, 1 << 50), st.floats(1.0, 1e12), st.floats(0.1, 1e6))
def test_a_deadline_grows_with_the_bytes_and_is_never_short(nbytes: int, bytes_per_s: float, least: float) -> None:
    """Whatever was measured: a transfer at its measured rate has three times what it needs."""
    timing = TimingOptions(least_transfer_s=least)
    assert transfer_deadline_s(nbytes, bytes_per_s, timing) >= max(least, 2.99 * nbytes / bytes_per_s)


def test_a_slow_link_is_refused_with_the_numbers() -> None:
    """Below min_push_bps while the measurement is fresh; an unknown link and an old measurement may try."""
    reason = too_slow(0.5e6, 10.0, TIMING)
    assert "4 Mbit/s" in reason
    assert "min_push_bps = 8 Mbit/s" in reason
    assert too_slow(1e6, 10.0, TIMING) == ""
    assert too_slow(None, 10.0, TIMING) == ""
    assert too_slow(0.5e6, 1000.0, TIMING) == ""
    assert too_slow(0.5e6, 10.0, TimingOptions()) == ""


def test_bandwidth_is_told_when_it_is_news() -> None:
    """The first measure, then changes of more than a twentieth; a heartbeat without a transfer says nothing."""
    bandwidth = Bandwidth()
    assert bandwidth.measure_rate(0.0) is None
    assert bandwidth.measure_rate(100.0) == 100.0
    assert bandwidth.measure_rate(110.0) is None
    assert bandwidth.measure_rate(0.0) is None
    assert bandwidth.mean == pytest.approx(103.0)
    means = [bandwidth.measure_rate(10.0) for _ in range(20)]
    assert [t for t in means if t is not None][-1] == pytest.approx(10.0, rel=0.35)
    assert means[-1] is None


@pytest.mark.parametrize("first", [20.0, 61.0, 80.0, 500.0])
def test_a_steady_link_is_known_better_than_a_window_waits_for_a_late_push(first: float) -> None:
    """What the first transfer told stayed up to a third beside the true rate for good: each push of the cluster was
    late by more than windows wait, and missed the others.
    """
    bandwidth = Bandwidth()
    for bytes_per_s in (*[first] * 4, *[50.0] * 40):
        bandwidth.measure_rate(bytes_per_s)
    assert bandwidth.reported == pytest.approx(50.0, rel=LATE_SHARE)


def test_the_judge_tells_what_heartbeats_say_of_a_incarnation() -> None:
    """A heartbeat with a rate gives BandwidthMeasured for that incarnation; an old incarnation's heartbeat gives
    nothing (invariant 5).
    """
    judge = Judge(TIMING)
    judge.welcome_cluster("a", 2, 0.0)

    def heartbeat(inc: int, rate: float) -> ClusterHeartbeat:
        told = ClusterHeartbeat("a", inc, TrainerState.TRAINING, Activity.PUSH, 1, 0, 0, 0, 0.0, None, 0, 0, rate)
        return replace(told, newest_protocol=0)

    assert judge.on_cluster_heartbeat(heartbeat(2, 50.0), 1.0) == [BandwidthMeasured("a", 2, 50.0)]
    assert judge.on_cluster_heartbeat(heartbeat(2, 51.0), 2.0) == []
    assert judge.on_cluster_heartbeat(heartbeat(1, 5.0), 3.0) == []
