"""Restarts while the last data range is trained: each sample counts once, and the run is finished (invariant 10)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from dips.client.agent.account import RangeQueue
from dips.protocol.data import RangeBook
from tests.simulation.__main__ import play_all, report
from tests.simulation.last_range import play_last_range

SEEDS = int(os.environ.get("DIPS_LAST_RANGE_SEEDS", "10"))
SOUGHT = 4 * SEEDS  # among which a fault is found


def test_every_sample_counts_once() -> None:
    """Ranges of H steps, one more and less, one range, more clusters than ranges; nearly all seeds meet a restart."""
    results = list(play_all(range(SEEDS), jobs=2, game="last-range"))
    failed = [report(r, game="last-range") for r in results if r.failure]
    assert not failed, "\n\n".join(failed[:3])
    assert sum(r.faults > 0 for r in results) >= 0.9 * SEEDS


@pytest.mark.parametrize(
    ("owner", "name", "broken", "found_at"),
    [
        (RangeQueue, "settle_part", lambda queue, used, begun: None, 27),
        (RangeBook, "begun_of", lambda book, ranges: (), 7),
    ],
    ids=["the agent forgets what settled pushes have trained", "the master does"],
)
def test_a_range_that_begins_anew_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., Any], found_at: int
) -> None:
    """Whoever goes on from the beginning of a range that is trained in part brings samples twice."""
    monkeypatch.setattr(owner, name, broken)
    found = (play_last_range((seed, None)).failure for seed in (found_at, *range(SOUGHT)))
    assert any(failure is not None and "brings sample" in failure.what for failure in found)
