"""Clusters of very unequal speed meet: benchmarks.pace, short, with the real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pace import lived


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_four_unequal_clusters_meet_in_the_same_windows(tmp_path: Path) -> None:
    """5.23 : 3.8 : 2.4 : 1 with 10 % jitter: after three rounds all are in at least 9 of 10 windows."""
    met = lived(tmp_path / "run", jitter=0.1, rounds=10, inner_steps=64)
    assert met.rounds >= 9, met
    # Shorter rounds than those of the benchmark, on a machine that tests share: the promise of 0.95 is kept there.
    assert met.tokens >= 0.8 * met.ideal, met
    slowest, fastest = (sum(met.steps[name]) for name in ("c3", "c0"))
    assert fastest == pytest.approx(5.23 * slowest, rel=0.1), met
