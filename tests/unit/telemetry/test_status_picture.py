"""The picture of a status: every state with its reason, nothing breaks when something is missing."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from dips.telemetry.status import format_count, one_line, render_status

STATUS: dict[str, Any] = {
    "run": "demo",
    "term": 2,
    "head": "v7@r9",
    "progress": {"tokens": 1_500_000, "tokens_target": 3_000_000},
    "round": {"state": "collecting", "round": 10, "reason": "1 committed, closes in 0.4 s", "pushes": []},
    "rounds": {"applied": 7, "unchanged": 1, "skipped": 1},
    "clusters": {
        "fast": {
            "state": "training",
            "reason": "it has v7@r9",
            "base": "v7@r9",
            "staleness": 0,
            "accepted": 7,
            "gated": 1,
            "skipped": 2,
            "tokens_accepted": 1_000_000,
            "inner_steps": 112,
            "loss": 2.5,
            "bytes_per_s": 25e6,
        }
    },
    "slaves": {
        "slave-0": {"state": "lost", "reason": "silent for 5.1 s", "version": None, "slots": 2, "slots_used": 1}
    },
    "finished": None,
}


def drawn(status: dict[str, Any]) -> str:
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
    differing = {**STATUS["clusters"]["fast"], "differs": {"loss": said, "direction": "cosine of 0.05"}}
    text = drawn({**STATUS, "clusters": {"a": differing, "b": STATUS["clusters"]["fast"]}})
    assert text.index("flagged, not gated: cosine of 0.05") < text.index(f"flagged, not gated: {said}")
    assert text.count("flagged, not gated") == 2


def test_data_is_tracked_or_said_not_to_be() -> None:
    """Ranges are counted by fate; a run without them says that nobody tracks what is read."""
    ranges = {"total": 100, "settled": 40, "leased": 4, "free": 56}
    assert "data: 40 settled, 4 leased, 56 free of 100 ranges" in drawn({**STATUS, "ranges": ranges})
    assert "data: the clusters' own, not tracked" in drawn({**STATUS, "ranges": {"total": 0}})


@pytest.mark.parametrize("status", [{}, {"clusters": {"a": {}}, "slaves": {"s": {}}}, {**STATUS, "round": {}}])
def test_what_is_missing_is_a_dash(status: dict[str, Any]) -> None:
    """A status of another version is drawn as far as it goes."""
    assert "–" in drawn(status)
    assert "head" in one_line(status)


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
