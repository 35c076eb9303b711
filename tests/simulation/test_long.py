"""Work that lasts five times what guards it: time alone ends nothing (docs/architecture.md#invariant-12)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from dips.master.core import SentOrder
from dips.slave.ports import Move
from dips.slave.receiver import IncomingPush
from dips.slave.sender import Sender
from tests.simulation.__main__ import play_all, report
from tests.simulation.long import LongTrial

SEEDS = int(os.environ.get("DIPS_LONG_SEEDS", "12"))
QUICK = 2  # of them in `make test`


TICK = Sender.tick


def close_what_nobody_asks(sender: Sender, now: float) -> list[Move]:
    """A pull ends where nothing moved for so long, whoever should have asked."""
    for pull in list(sender._pulls.values()):
        if now - pull.moved_at >= sender._stall_s:
            sender.close_pull(pull.pull, "nothing moved")
    return TICK(sender, now)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seeds", [range(QUICK), pytest.param(range(QUICK, SEEDS), marks=pytest.mark.slow)], ids=str)
def test_no_push_is_dropped_and_no_round_skipped_by_time_alone(seeds: range) -> None:
    """Without faults nothing is lost; with faults every invariant holds, and the run goes on afterwards."""
    results = list(play_all(seeds, jobs=2, game="long"))
    failed = [report(r, game="long") for r in results if r.failure]
    assert not failed, "\n\n".join(failed[:3])


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Sender, "tick", close_what_nobody_asks),
        (IncomingPush, "silent_since", lambda push: push.moved_at),
        (SentOrder, "on_progress", lambda sent, now, most_s=0.0: None),
    ],
    ids=["who is not asked stalls", "who waits for its turn stalls", "work is no progress"],
)
def test_a_rule_that_counts_time_alone_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., Any]
) -> None:
    """Each of the former rules loses something on the first seeds without faults."""
    monkeypatch.setattr(owner, name, broken)
    assert any(LongTrial(seed).play().failure is not None for seed in (2, 0, 4))
