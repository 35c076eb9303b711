"""The picture of a status: every state with its reason, nothing breaks when something is missing."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from dips.errors import RemoteProtocolError
from dips.protocol.enums import RoundState
from dips.protocol.view import ProgressView, RangesView, RoundCounts, RoundView, RunView
from dips.view.judging import read_view
from dips.view.terminal import format_count, one_line, render_status
from tests.unit.view.views import make_cluster, make_run, make_slave

FAST = make_cluster(
    reason="it has v7@r9", base="v7@r9", staleness=0, accepted=7, skipped=2, tokens_accepted=1_000_000,
    inner_steps=112, loss=2.5, bytes_per_s=25e6,
)  # fmt: skip
STATUS = make_run(
    term=2,
    head="v7@r9",
    progress=ProgressView(1_500_000, 3_000_000),
    round=RoundView(RoundState.COLLECTING, 10, "1 committed, closes in 0.4 s"),
    rounds=RoundCounts(7, 1, 1),
    clusters={"fast": replace(FAST, gated=1)},
    slaves={"slave-0": make_slave("lost", "silent", "silent for 5.1 s", slots=2, slots_used=1)},
)


def drawn(status: RunView) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(render_status(status))
    return out.getvalue()


def test_every_state_has_its_reason() -> None:
    """Run, round, clusters and slaves are all there, in numbers that a person reads."""
    text = drawn(STATUS)
    for part in (
        *("v7@r9", "term 2", "1.50M tokens (50%)", "7 applied, 1 unchanged, 1 skipped"),
        *("r10 collecting: 1 committed, closes in 0.4 s", "training", "2.500", "25.0", "7/1/2"),
        *("lost", "silent for 5.1 s", "1/2"),
    ):
        assert part in text


def test_who_always_was_different_is_flagged_in_words() -> None:
    """A line for each difference under its row, with the numbers; nobody else has one."""
    said = "its loss is usually +30 % of the others' above theirs"
    differing = replace(FAST, differs={"loss": said, "direction": "cosine of 0.05"})
    text = drawn(make_run(clusters={"a": differing, "b": FAST}))
    assert text.index("flagged, not gated: cosine of 0.05") < text.index(f"flagged, not gated: {said}")
    assert text.count("flagged, not gated") == 2


def test_data_is_tracked_or_said_not_to_be() -> None:
    """Ranges are counted by fate; a run without them says that nobody tracks what is read."""
    ranges = RangesView(100, settled=40, leased=4, free=56)
    assert "data: 40 settled, 4 leased, 56 free of 100 ranges" in drawn(replace(STATUS, ranges=ranges))
    assert "data: the clusters' own, not tracked" in drawn(STATUS)


@pytest.mark.parametrize(
    "status",
    [{}, {"clusters": {"a": {"state": "training"}}, "slaves": {"s": {"state": "lost", "new": 1}}, "unheard": [1]}],
)
def test_the_status_of_another_version_is_drawn_as_far_as_it_goes(status: dict[str, Any]) -> None:
    """What it lacks is a dash, what it has more is passed over; a word that is not known is said to be that."""
    assert "–" in drawn(read_view(status))
    assert "head" in one_line(read_view(status))
    with pytest.raises(RemoteProtocolError, match="not that of this version of Di-PS"):
        read_view({"clusters": {"a": {"state": "dreaming"}}})


def test_one_line() -> None:
    """A log gets one line, with every state."""
    line = one_line(STATUS)
    assert "\n" not in line
    assert "head v7@r9, 7 applied 1 skipped 1 unchanged" in line
    assert "fast training steps 112 loss 2.500 on v7@r9 (stale 0)" in line
    assert "slave-0 lost –" in line


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0"), (9999, "9999"), (12_345, "12k"), (1_234_567, "1.23M"), (7.2e9, "7.20G")]
)
def test_counts_are_short(value: float | None, text: str) -> None:
    """Big counts are shortened, small ones exact."""
    assert format_count(value) == text
