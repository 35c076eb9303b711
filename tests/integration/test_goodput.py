"""Two minutes of the published trace against our own: a server and a cluster are killed, one cut off, one stopped."""

from __future__ import annotations

import pytest

from benchmarks import namespaces
from benchmarks.goodput import CLUSTERS, STEP_S, TOKENS, GoodputRun, live, read_trace
from tests.chaos import disks

MINUTES = 2.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing())),
    pytest.mark.skipif(disks.missing() is not None, reason=str(disks.missing())),
]


def test_what_is_in_theta_is_the_references_under_faults() -> None:
    """Every version that a cluster installed; and most of what is trained is in θ, though here the cores are busy."""
    trace = read_trace().first(MINUTES)
    assert {(f.what, f.who.rstrip("0123456789")) for f in trace.faults} == {
        ("kill", "server"), ("cut", "cluster"), ("kill", "cluster"), ("stop", "cluster"),
    }  # fmt: skip
    found = live(GoodputRun, trace, print)
    assert found.wrong == ""
    assert found.tokens >= 0.5 * CLUSTERS * TOKENS / STEP_S * 60 * MINUTES, found
