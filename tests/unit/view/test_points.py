"""What curves and trackers say of a round: which pushes were gated, and which versions rolled back."""

from __future__ import annotations

from dataclasses import replace

from dips.ids import GENESIS, PushId, VersionId
from dips.outer_step import nesterov_step
from dips.protocol.enums import OutcomeKind
from dips.protocol.records import FoldRow, OutcomeRow
from dips.view.points import PointMaker, RoundHistory, list_points, name_numbers

V1, V2 = VersionId(1, 1), VersionId(2, 2)


def applied(version: VersionId, parent: VersionId, undone: str | None) -> RoundHistory:
    """One push of `a` in it, and a gated one of `b`."""
    a, b = PushId("a", 1, version.round), PushId("b", 1, version.round)
    outcomes = (
        OutcomeRow(a, OutcomeKind.ACCEPTED, "", 100, 4, 1.25, 0.5, ()),
        OutcomeRow(b, OutcomeKind.GATED, "too far", 7, 4, 90.0, 8.0, ()),
    )
    return RoundHistory(
        version.round, "applied", "", 0.0, 10.0, version, parent, 100, nesterov_step(1.0, 0.7, 0.8), 3.0, False,
        (FoldRow(a, parent, 100, 4, 1.0, 1.25, 0.5, 2.5, ()),), outcomes, undone=undone,
    )  # fmt: skip


def test_what_was_gated_and_what_was_undone() -> None:
    rounds = [applied(V1, GENESIS, None), applied(V2, V1, "a disk was lost")]
    points, _ = list_points(rounds)
    assert [(p.cluster, p.kind, p.undone) for point in points for p in point.pushes] == [
        ("a", "accepted", False), ("b", "gated", False), ("a", "accepted", True), ("b", "gated", True),
    ]  # fmt: skip
    numbers = name_numbers(points[0])
    assert (numbers["gated/a"], numbers["gated/b"]) == (0.0, 1.0)


def test_tokens_a_second_are_since_the_one_before() -> None:
    """Of a version since its parent, of a cluster since its last push that was judged; the first has none."""
    rounds = [replace(applied(V1, GENESIS, None), ended=10.0), replace(applied(V2, V1, None), ended=30.0)]
    (first, second), _ = list_points(rounds)
    assert (first.tokens_per_s, second.tokens_per_s) == (None, 5.0)
    assert [p.tokens_per_s for p in second.pushes] == [5.0, 0.35]
    assert (first.run_tokens, second.run_tokens, second.loss) == (100, 200, 2.5)


def test_points_may_begin_in_the_middle() -> None:
    """A master recalls the newest rounds; the tokens before them are told."""
    maker = PointMaker()
    maker.begin(V1, 1000)
    point = maker.make_point(applied(V2, V1, None))
    assert point is not None and point.run_tokens == 1100 and maker.tokens_of(V2) == 1100
