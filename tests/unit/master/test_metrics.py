"""Samples of a master's status that are counted from it."""

from __future__ import annotations

from dips.master.metrics import count_standings


def test_clusters_are_counted_by_what_they_can_and_did() -> None:
    """A lease; a trainer that trains and may push; a part in the newest version, if there is one."""
    clusters = {
        "a": {"state": "training", "trainer": "training"},
        "b": {"state": "idle", "trainer": "dead"},
        "c": {"state": "training", "trainer": "training", "quarantined": True},
        "d": {"state": "gone", "trainer": "training"},
    }
    began = {"clusters": clusters, "newest": None}
    assert count_standings(began) == {"live": 3, "participating": 1, "contributing": 0}
    assert count_standings({**began, "newest": {"clusters": 2}})["contributing"] == 2
