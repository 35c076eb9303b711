"""Who a window waits for: whose push will be here before it ends, as far as pace and bandwidth tell
(docs/rationale.md#24)."""

from __future__ import annotations

import pytest

from dips.protocol import events as ev
from dips.protocol.effects import Apply
from tests.transcripts.story import Teller
from tests.unit.protocol.scripted_run import ScriptedRun


def closed_after_one_commit(pace_s: float, bytes_per_s: float) -> bool:
    """a commits alone; b trains, asked for its last push just now, and has pushed each `pace_s` so far."""
    teller = Teller({"window": "10"})
    teller.ready("all", {})
    for cluster in "ab":
        teller.joins(cluster, {})
        teller.trains(cluster, {})
    teller.step(ev.BandwidthMeasured("b", 1, bytes_per_s))
    b = teller.machine._run.clusters["b"]
    b.requested_at = teller.now
    b.paces.append(pace_s)
    teller.machine._run.follow_cluster(b)
    teller.pushes("a", {"push": "a/1#2", "tokens": "100"})
    teller.answers("all", {"only": "Measure"})
    teller.answers("all", {"only": "Fold"})
    return any(isinstance(order.body, Apply) for order in teller.orders)


@pytest.mark.parametrize(
    ("pace_s", "bytes_per_s", "closed"),
    [
        (5.0, 32.0, False),  # asks in 5 s, is here in 6
        (9.5, 32.0, True),  # asks before the window ends, is here after it
        (5.0, 2.0, True),  # asks in 5 s, needs 16 more
        (12.0, 32.0, True),
    ],
)
def test_a_window_waits_for_pushes_not_for_requests(pace_s: float, bytes_per_s: float, closed: bool) -> None:
    """A pace runs from request to request; the 32 bytes of the model take their time besides."""
    assert closed_after_one_commit(pace_s, bytes_per_s) is closed


def test_a_push_is_expected_later_by_the_time_that_its_link_takes() -> None:
    """As soon as its cluster's bandwidth is known."""
    run = ScriptedRun()
    run.train("a")
    for _ in range(2):
        run.outcome(run.push("a"))
        run.wait(30.0)
    before = run.machine._run.next_pushes.first_at()
    run.step(ev.BandwidthMeasured("a", 1, run.manifest.numel * 4 / 3.0))
    assert run.machine._run.next_pushes.first_at() == pytest.approx(before + 3.0)
