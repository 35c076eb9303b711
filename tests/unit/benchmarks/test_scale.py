"""The scripted run that the cost of a master is measured with: lives of pushes through the real core."""

from __future__ import annotations

from argparse import Namespace
from io import StringIO

from rich.console import Console

from benchmarks.harness import Bench
from benchmarks.scale import measure
from benchmarks.scale_run import ScaleRun
from dips.protocol.effects import Grant, Refused
from tests.simulation.indexes import index_differences


def test_pushes_live_and_every_index_is_right() -> None:
    """Rounds, a queue for the slots and pulls at once; afterwards every index says what a scan would give."""
    run = ScaleRun(clusters=6, slaves=3, layers=7, slots=2)
    run.beat_all(1)
    for seq in (2, 3):
        for cluster in run.clusters[:3]:
            run.live_push(cluster, seq)
    assert run.coordinator_head.version == 6
    answers = [run.open_push(cluster, 4) for cluster in run.clusters]
    assert [type(answer) for answer in answers] == [Grant] * 2 + [Refused] * 4
    assert [answer.place for answer in answers[2:]] == [1, 2, 3, 4]
    for cluster in run.clusters[1:]:
        run.abort_push(cluster, 4)
    assert all(isinstance(run.open_pull(cluster, 5), Grant) for cluster in run.clusters[1:])
    assert list(index_differences(run.coordinator.capture_state())) == []  # type: ignore[arg-type]
    assert sum(run.count.values()) > 200 and min(run.took.values()) > 0


def test_what_a_commit_writes_does_not_grow_with_the_clusters() -> None:
    """The benchmark itself, small: every part runs, and a row among more clusters is no larger than among few."""
    bench = Bench("scale", True, Namespace(), Console(file=StringIO()))
    measure(bench, many=12, ledger_clusters=(4, 12))
    rows = {row.name: row for row in bench.rows}
    assert len(rows) > 20
    assert rows["row of a commit, 12 clusters"].holds
    assert rows["heartbeat's answer, the same list"].value < rows["heartbeat's answer, another list"].value
