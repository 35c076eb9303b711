"""The published trace, and the replay by which a peer's θ is held against the reference."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.goodput import (
    CLUSTERS,
    KINDS,
    TRACE,
    GoodputPeer,
    GoodputRun,
    make_trace,
    read_trace,
    replay,
    spell_trace,
)
from benchmarks.peer_rank import OuterStepSeen
from benchmarks.peer_run import read_lines
from tests.chaos.predict import LR, MOMENTUM
from tests.chaos.train_chaos import START, constant

NAMES = [f"c{i}" for i in range(3)]


def test_the_published_trace_is_the_drawn_one() -> None:
    """Whoever doubts the file draws it again from its seed."""
    assert TRACE.read_text() == spell_trace(make_trace())
    assert read_trace() == make_trace()


def test_the_trace_is_of_every_kind_each_29_seconds_for_30_minutes() -> None:
    trace = read_trace()
    assert (trace.clusters, trace.servers, trace.minutes, len(trace.faults)) == (8, 2, 30.0, 62)
    assert [fault.at_s for fault in trace.faults] == [29.0 * k for k in range(1, 63)]
    assert Counter(fault.what for fault in trace.faults).keys() == KINDS.keys()
    assert {fault.who for fault in trace.faults} > {"coordinator", "server0", "server1"}


def test_the_first_minutes_end_with_a_whole_fault() -> None:
    """A fault that would end after them is not played at all."""
    trace = read_trace()
    for minutes in (0.5, 2.0, 10.0, 30.0):
        assert all(fault.at_s + fault.for_s <= 60 * minutes for fault in trace.first(minutes).faults)
    assert {fault.what for fault in trace.first(2.0).faults} == {"kill", "cut", "stop"}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"at_s": 5.0, "what": "melt", "who": "cluster0", "for_s": 1.0}, "expected kill, stop, cut, slow, disk"),
        ({"at_s": 5.0, "what": "kill", "who": "cluster8", "for_s": 1.0}, "cluster7"),
        ({"at_s": 5.0, "what": "kill", "who": "cluster0", "for_s": 0.0}, "for > 0 s"),
        ({"at_s": 2.0, "what": "kill", "who": "cluster0", "for_s": 1.0}, "before the one before it ends, at 3 s"),
    ],
)
def test_a_trace_that_cannot_be_played_is_refused(tmp_path: Path, fault: dict[str, object], says: str) -> None:
    first = {"at_s": 1.0, "what": "stop", "who": "cluster1", "for_s": 2.0}
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"clusters": 8, "servers": 2, "minutes": 1.0, "faults": [first, fault]}))
    with pytest.raises(ValueError, match=says):
        read_trace(file)


def test_peers_without_servers_are_spared_their_failures() -> None:
    parts = {fault.who for fault in read_trace().faults}
    ours, theirs = GoodputRun.name, GoodputPeer.name
    assert {ours(None, who) for who in parts} == {"master", "ps0", "ps1", *(f"c{i}" for i in range(CLUSTERS))}  # type: ignore[arg-type]
    assert {theirs(None, who) for who in parts} == {"master", None, *(f"c{i}" for i in range(CLUSTERS))}  # type: ignore[arg-type]


def history(contributed: list[list[str]]) -> list[float]:
    """θ after each outer step of those that contribute to it."""
    theta, m, found = np.float32(START), np.float32(0), []
    for step, names in enumerate(contributed):
        mean = np.float32(np.mean([float(theta) - float(np.float32(constant(name, step, 0))) for name in names]))
        m = np.float32(MOMENTUM) * m + mean
        theta = theta - np.float32(LR) * (mean + np.float32(MOMENTUM) * m)
        found.append(float(theta))
    return found


def said(contributed: list[list[str]], silent: dict[int, str] | None = None) -> dict[str, list[OuterStepSeen]]:
    """What clusters write of such a run; `silent`: who dies before its line of a step."""
    numbers = history(contributed)
    return {
        name: [
            OuterStepSeen(10.0 * step, step, True, number, 0.0, 0)
            for step, (number, names) in enumerate(zip(numbers, contributed, strict=True), 1)
            if name in names and (silent or {}).get(step) != name
        ]
        for name in NAMES
    }


def test_a_run_of_whoever_was_there_is_the_references() -> None:
    contributed = [NAMES, ["c0", "c2"], NAMES]
    found = replay(said(contributed))
    assert found.wrong == ""
    assert [found.contributed[step] for step in (1, 2, 3)] == [frozenset(names) for names in contributed]


def test_a_cluster_that_dies_before_its_line_has_contributed_all_the_same() -> None:
    found = replay(said([NAMES, NAMES], silent={2: "c1"}))
    assert found.wrong == "" and found.contributed[2] == frozenset(NAMES)


def test_one_that_comes_back_may_bring_its_healers_parameters() -> None:
    """They are in the mean, but no token of them is counted twice."""
    steps = said([NAMES, ["c0", "c1", "c1"]])
    steps["c2"].append(OuterStepSeen(20.0, 2, False, steps["c0"][1].number, 0.0, 0))
    found = replay(steps)
    assert found.wrong == "" and found.contributed[2] == frozenset({"c0", "c1"})


def test_another_theta_is_told_with_its_step() -> None:
    steps = said([NAMES, NAMES])
    for each in steps.values():
        each[1] = each[1]._replace(number=each[1].number + 1e-3)
    assert "outer step 2 of c0, c1, c2" in replay(steps).wrong


def test_a_step_that_is_taken_again_counts_once() -> None:
    """After a checkpoint: what was lost is not in θ."""
    steps = said([NAMES, NAMES])
    for each in steps.values():
        each.insert(1, each[1]._replace(number=9.0, at=15.0))
    found = replay(steps)
    assert found.wrong == "" and set(found.contributed) == {1, 2}


def test_a_line_that_a_death_tore_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "c0.steps").write_text("[1, 2]\n[3, 4")
    assert read_lines(tmp_path / "c0.steps") == [[1, 2]]
