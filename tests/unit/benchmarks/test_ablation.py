"""What the benchmarks on shaped links count by themselves: a model's parts, attempts, transfers."""

from __future__ import annotations

import argparse

import pytest
from rich.console import Console

from benchmarks.ablation import Took, gain
from benchmarks.cast import Cast
from benchmarks.harness import Bench
from benchmarks.slow_cluster import SlowClusterRun, attempts, transfers
from dips.codecs import Codec
from dips.wire.chunks import LayerLayout, describe_uncovered


@pytest.mark.parametrize("codec", [Codec.FP32, Codec.INT8])
def test_the_ranks_of_a_cast_hold_everything_once(codec: Codec) -> None:
    """Each slave's layers are covered by the ranks' pieces, and a push's bytes are those of its chunks."""
    cast = Cast(slaves=2, ranks=4, layers=6, numel=6 * 4 * 4096, codec=codec)
    assert Cast.parse(str(cast)) == cast
    assert sorted(layer for s in range(2) for layer in cast.held_by(s)) == list(range(6))
    for slave in range(2):
        held = cast.held_by(slave)
        claims = {str(r): [p.range for p in cast.pieces(r, 0.0) if p.layer in held] for r in range(4)}
        assert describe_uncovered(LayerLayout(cast.manifest, held), claims) == []
    share = 0.25 if codec.lossy else 1.0
    assert share * cast.nbytes <= cast.wire_bytes <= 1.1 * share * cast.nbytes


def mark(at: float, kind: str, **fields: object) -> dict[str, object]:
    return {"at": at, "kind": kind, **fields}


def test_a_pull_that_failed_counts_for_the_one_that_succeeds() -> None:
    """One that never succeeded counts as one more than it was tried."""
    fine, failed = mark(1, "pull_end", installed=True), mark(1, "pull_end", installed=False)
    assert attempts([fine, failed, fine, fine]) == [1, 2, 1]
    assert attempts([fine, failed, failed]) == [1, 3]
    assert attempts([mark(1, "push_end", ok=False)]) == []


def test_a_transfer_lasts_from_its_begin_to_its_good_end() -> None:
    """What failed does not count."""
    marks = [
        mark(1, "push_begin"), mark(3, "push_end", ok=True), mark(4, "pull_begin"),
        mark(9, "pull_end", installed=False), mark(10, "pull_begin"), mark(14, "pull_end", installed=True),
    ]  # fmt: skip
    assert transfers(marks) == [2, 4]


def test_a_round_is_the_mean_time_between_outer_steps() -> None:
    """The first two of each cluster are warming up."""
    steps = {"a": [{"ended": t} for t in (0, 50, 60, 62, 66)], "b": [{"ended": t} for t in (0, 9, 60, 66)]}
    assert SlowClusterRun(steps, {}).round_s(["a", "b"]) == 4


@pytest.mark.parametrize(("without", "holds"), [(1.5, True), (1.0, False)])
def test_a_part_without_a_gain_is_a_row_of_the_same_claim(without: float, holds: bool) -> None:
    """The table would have kept the gain of the run before beside it, since the seconds stood in what it is held to."""
    bench = Bench("ablation", False, argparse.Namespace(), Console(quiet=True))
    on, off = ([Took(seconds, 0.0, 0.0)] * 3 for seconds in (1.0, without))
    gain(bench, "2 lanes", on, off, against="1 lane", least=1.2)
    assert [(row.name, row.against, row.holds) for row in bench.rows] == [("2 lanes", "1 lane", holds)]
    assert bench.notes == ([] if holds else ["2 lanes: no gain: 1 lane took 1 s"])
