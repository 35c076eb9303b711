"""What curves and trackers say of a round: which pushes were gated, and which versions rolled back."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dips.ids import GENESIS, PushId, VersionId
from dips.outer_step import nesterov_step
from dips.protocol.enums import OutcomeKind
from dips.protocol.records import FoldRow, OutcomeRow
from dips.view import points
from dips.view.points import (
    PointMaker,
    ResultHistory,
    RoundHistory,
    list_points,
    mean_loss,
    name_numbers,
    name_results,
)

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
    made, _ = list_points(rounds)
    assert [(p.cluster, p.kind, p.undone) for point in made for p in point.pushes] == [
        ("a", "accepted", False), ("b", "gated", False), ("a", "accepted", True), ("b", "gated", True),
    ]  # fmt: skip
    numbers = name_numbers(made[0])
    assert (numbers["gated/a"], numbers["gated/b"]) == (0.0, 1.0)


def test_tokens_a_second_are_since_the_one_before() -> None:
    """Of a version since its parent, of a cluster since its last push that was judged; the first has none."""
    rounds = [replace(applied(V1, GENESIS, None), ended=10.0), replace(applied(V2, V1, None), ended=30.0)]
    (first, second), _ = list_points(rounds)
    assert (first.tokens_per_s, second.tokens_per_s) == (None, 5.0)
    assert [p.tokens_per_s for p in second.pushes] == [5.0, 0.35]
    assert (first.run_tokens, second.run_tokens, second.loss) == (100, 200, 2.5)


def test_rounds_behind_a_rollback_have_the_tokens_of_its_target() -> None:
    """What had been undone counted for pushes that were gated before the next version."""
    unchanged = replace(applied(VersionId(3, 3), V1, None), kind="unchanged", version=None, parent=None, folds=())
    rounds = [applied(V1, GENESIS, None), applied(V2, V1, "a disk was lost"), unchanged]
    made, _ = list_points(rounds)
    assert [(p.run_tokens, [push.run_tokens for push in p.pushes]) for p in made] == [
        (100, [100, 100]), (200, [200, 200]), (100, [100, 100]),
    ]  # fmt: skip
    maker = PointMaker()  # as it happens
    for r in rounds[:2]:
        maker.make_point(replace(r, undone=None))
    maker.go_back(V1)
    again = maker.make_point(unchanged)
    assert again is not None and again.run_tokens == 100


def test_only_so_many_versions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest: a run of years must not fill the memory of who draws it."""
    monkeypatch.setattr(points, "VERSIONS_KEPT", 2)
    maker, versions = PointMaker(), [VersionId(n, n) for n in range(4)]
    for parent, version in pairwise(versions):
        maker.make_point(applied(version, parent, None))
    assert [maker.go_back(version) for version in versions] == [None, None, 200, 300]


def test_a_version_whose_parent_is_forgotten_has_no_total() -> None:
    """The same of two rounds that end at once: no rate can be told."""
    maker = PointMaker()
    far = maker.make_point(applied(V2, VersionId(1, 7), None))
    assert far is not None and (far.run_tokens, far.tokens_per_s) == (None, None)
    at_once = [applied(V1, GENESIS, None), applied(V2, V1, None)]
    assert [point.tokens_per_s for point in list_points(at_once)[0]] == [None, None]


def test_a_loss_is_the_mean_of_those_who_told_one() -> None:
    """By tokens; without any there is none."""
    fold = applied(V1, GENESIS, None).folds[0]
    folds = [replace(fold, tokens=tokens, loss=loss) for tokens, loss in ((300, 1.0), (100, 5.0), (9, None))]
    assert mean_loss(folds) == 2.0
    assert mean_loss(folds[2:]) is None and mean_loss([replace(fold, tokens=0)]) is None


def test_results_of_a_version() -> None:
    """A point for each number, one with the reason of a failure; none of a round that made no version or goes on."""
    done = replace(
        applied(V1, GENESIS, None), opened=4.0, result=ResultHistory(True, "", {"x": 1.5, "y": 2.0}, 3.0, 9.0)
    )
    failed = replace(applied(V2, V1, "rolled back"), ended=12.0, result=ResultHistory(False, "exit 1", {}, 3.0, 9.0))
    _, results = list_points([done, failed, replace(done, version=None), replace(done, ended=None)])
    assert [(p.round, p.name, p.value, p.reason, p.undone, p.seconds) for p in results] == [
        (1, "x", 1.5, "", False, 6.0), (1, "y", 2.0, "", False, 6.0), (2, "", None, "exit 1", True, 8.0),
    ]  # fmt: skip
    assert (
        name_results(done) == {"on_version/x": 1.5, "on_version/y": 2.0} and name_results(applied(V1, V2, None)) == {}
    )


def test_numbers_of_a_round_without_a_version() -> None:
    """Its kind, and of its pushes those that were judged."""
    skipped = replace(applied(V1, GENESIS, None), kind="skipped", version=None, parent=None)
    outcomes = (replace(skipped.outcomes[0], kind=OutcomeKind.SKIPPED), skipped.outcomes[1])
    (point,), _ = list_points([replace(skipped, outcomes=outcomes)])
    numbers = name_numbers(point)
    assert numbers["round/skipped"] == 1.0 and not set(numbers) & {
        *("run/version", "run/tokens", "run/delta_norm", "run/clipped", "norm/a"),
    }
    assert (numbers["norm/b"], numbers["gated/b"]) == (90.0, 1.0)
    numbers = name_numbers(list_points([applied(V1, GENESIS, None)])[0][0])
    assert "round/applied" not in numbers and (numbers["run/delta_norm"], numbers["run/version"]) == (3.0, 1.0)


def test_points_may_begin_in_the_middle() -> None:
    """A master recalls the newest rounds; the tokens before them are told."""
    maker = PointMaker()
    maker.begin(V1, 1000)
    point = maker.make_point(applied(V2, V1, None))
    assert point is not None and point.run_tokens == 1100 and maker.go_back(V2) == 1100
