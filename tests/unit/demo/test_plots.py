"""The demo's pictures: timelines are cut into spans that follow each other, and the files are written."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from dips.demo.plots import cluster_spans, draw_timeline, master_spans, slave_spans, slaves_in


def marks(*kinds: str, **fields: Any) -> list[dict[str, Any]]:
    """One mark a second."""
    common = {"tokens": 1, "loss": 2.0, "installed": True, "version": "v1@r1", "contributions": "2", **fields}
    return [{"at": 100.0 + i, "kind": kind, **common} for i, kind in enumerate(kinds)]


ROUND = ("inner", "push_begin", "push_end", "window_begin", "window_end", "pull_begin", "pull_end", "inner")


def test_a_round_of_a_cluster() -> None:
    """Push, window and pull lie between inner steps, without gaps."""
    spans = list(cluster_spans(marks("trainer_start", "trainer_attached", "pull_begin", "pull_end", *ROUND)))
    assert [what for what, _, _ in spans] == ["down", "pull", "inner", "push", "window", "pull", "inner"]
    assert all(one[2] == following[1] for one, following in pairwise(spans))


def test_an_outage() -> None:
    """From the trainer's death to the end of its successor's first pull the cluster is down."""
    given = marks("trainer_start", "pull_end", "inner", "trainer_gone", "inner", "trainer_start", "pull_end", "inner")
    assert list(cluster_spans(given)) == [
        ("down", 100.0, 101.0),
        ("inner", 101.0, 103.0),
        ("down", 103.0, 106.0),
        ("inner", 106.0, 107.0),
    ]


def test_after_the_last_trainer_nothing_is_missing() -> None:
    """The end of the run is no outage; an empty timeline has no spans."""
    given = marks("trainer_start", "pull_end", "inner", "trainer_gone", "trainer_end")
    assert list(cluster_spans(given))[-1] == ("inner", 101.0, 103.0)
    assert list(cluster_spans([])) == []


def test_rounds_of_the_master() -> None:
    """A round takes commits, is applied and persisted, and ends, in whatever way."""
    given = marks(
        "round_opened", "round_applying", "round_persisting", "version_committed", "round_opened", "round_skipped"
    )
    assert list(master_spans(given)) == [
        ("collecting", 100.0, 101.0),
        ("updating", 101.0, 103.0),
        ("collecting", 104.0, 105.0),
    ]


def test_slaves_as_the_master_saw_them() -> None:
    """A slave is ready until it is lost and again when it is back; others have their own rows."""
    given = [
        {"at": 1.0, "kind": "slave_ready", "slave": "s0"},
        {"at": 2.0, "kind": "slave_ready", "slave": "s1"},
        {"at": 5.0, "kind": "slave_lost", "slave": "s1"},
        {"at": 7.0, "kind": "slave_ready", "slave": "s1"},
        {"at": 9.0, "kind": "run_finished"},
    ]
    assert slaves_in(given) == ["s0", "s1"]
    assert list(slave_spans(given, "s0")) == [("ready", 1.0, 9.0)]
    assert list(slave_spans(given, "s1")) == [("ready", 2.0, 5.0), ("down", 5.0, 7.0), ("ready", 7.0, 9.0)]


def test_the_picture_is_written(tmp_path: Path) -> None:
    """It is a PNG, for a whole run as for one in which nothing happened."""
    full = {
        "fast": marks("trainer_start", "pull_end", *ROUND),
        "slow": marks("trainer_start", "pull_end", "trainer_gone", "trainer_start", "pull_end", *ROUND),
        "master": marks("round_opened", "round_applying", "version_committed"),
    }
    empty: dict[str, list[dict[str, Any]]] = {"fast": [], "slow": [], "master": []}
    for lines in (full, empty):
        assert draw_timeline(lines, tmp_path).read_bytes().startswith(b"\x89PNG")
