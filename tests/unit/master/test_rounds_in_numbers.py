"""What curves and trackers say of a round: which pushes were gated, and which versions rolled back."""

from __future__ import annotations

from dips.ids import GENESIS, PushId, VersionId
from dips.master.ledger_history import RoundHistory
from dips.master.loss_curve import list_pushes
from dips.master.track_points import RunTotals, point_of_round
from dips.outer_step import nesterov_step
from dips.protocol.enums import OutcomeKind
from dips.protocol.records import FoldRow, OutcomeRow

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
    assert [(p.cluster, p.kind, p.undone) for p in list_pushes(rounds)] == [
        ("a", "accepted", False), ("b", "gated", False), ("a", "accepted", True), ("b", "gated", True),
    ]  # fmt: skip
    point = point_of_round(rounds[0], RunTotals())
    assert point is not None and (point.numbers["gated/a"], point.numbers["gated/b"]) == (0.0, 1.0)
