"""The whole round's breakdown: phases follow one another and add up to the round."""

from __future__ import annotations

import pytest

from benchmarks.round import PHASES, phases

MASTER = [
    {"at": 3.0, "kind": "round_opened", "round": "2"},
    {"at": 4.0, "kind": "round_applying", "round": "2"},
    {"at": 4.5, "kind": "round_persisting", "round": "2", "version": "v2@r2"},
    {"at": 6.5, "kind": "version_committed", "round": "2", "version": "v2@r2"},
    {"at": 9.0, "kind": "round_applying", "round": "3"},
]


def cluster(shift: float) -> list[dict[str, object]]:
    kinds = {"push_begin": 1.5, "push_end": 3.0, "pull_begin": 7.0, "pull_end": 8.0}
    this = [{"at": at + shift, "kind": kind} for kind, at in kinds.items()]
    return [{"at": 0.5, "kind": "push_end"}, *this]  # the first is of the round before


def test_phases_end_with_the_last_cluster_and_add_up() -> None:
    """Each phase ends when the last cluster, or the master, has left it; nothing of another round counts."""
    steps = [
        [{"begun": 1.0 + d, "ended": 8.5 + d, "version": "v2@r2"}, {"begun": 9.0, "ended": 9.5, "version": "v3@r3"}]
        for d in (0.0, 0.25)
    ]
    made = phases("v2@r2", steps, [cluster(0.0), cluster(0.25)], MASTER)
    expected = [0.75, 1.5, 0.75, 0.5, 2.0, 0.75, 1.0, 0.5]
    assert [made[phase] for phase in PHASES] == pytest.approx(expected)
    assert made["round"] == pytest.approx(sum(expected)) == pytest.approx(7.75)


def test_a_round_that_a_cluster_missed_is_no_measurement() -> None:
    """If somebody trained on alone, the benchmark fails instead of being fast."""
    steps = [[{"begun": 1.0, "ended": 8.0, "version": "v2@r2"}], [{"begun": 1.0, "ended": 2.0, "version": "v1@r1"}]]
    with pytest.raises(ValueError, match="1 clusters took part"):
        phases("v2@r2", steps, [cluster(0.0)], MASTER)
