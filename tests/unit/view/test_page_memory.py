"""What the page remembers: curves, spans, events and rejections, from the Coordinator's steps, all of it bounded."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from dips.errors import DifferentModel, UnavailableMaster
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer_step import nesterov_step
from dips.protocol.effects import Failed, Note, Reply
from dips.protocol.enums import OutcomeKind, RoundResult, Severity
from dips.protocol.events import ClusterJoined, PullFinished, Ticked
from dips.protocol.records import FoldRow, OutcomeRow, RolledBack, RoundEnded, ScoreHistory, VersionCommitted
from dips.view.page import curves, memory
from dips.view.page.curves import CurvePoint
from dips.view.page.memory import RUN_LANE, PageMemory, SpanBook, SpanKind, describe_note
from tests.unit.view.test_points import applied

WEST = PushId("west", 1, 3)


def note(kind: str, **fields: object) -> Note:
    return Note(kind, tuple((key, str(value)) for key, value in fields.items()))


def outcome(kind: OutcomeKind, reason: str = "", push: PushId = WEST) -> OutcomeRow:
    return OutcomeRow(push, kind, reason, 100, 5, 1.0, 0.5, ())


def version(n: int, tokens: int = 100, loss: float | None = 2.0, after: int | None = None) -> VersionCommitted:
    """Made by round n of one push."""
    before = n - 1 if after is None else after
    fold = FoldRow(WEST, VersionId(n - 1, n - 1), tokens, 5, 1.0, 1.0, 0.5, loss, ())
    return VersionCommitted(
        VersionId(n, n), VersionId(before, before), True, (fold,), (outcome(OutcomeKind.ACCEPTED),),
        nesterov_step(1.0, 0.7, 0.8), 1.0, False, (), (), ScoreHistory((), ()), 0.0,
    )  # fmt: skip


def see(seen: PageMemory, wall: float, *effects: object, event: object = None) -> None:
    seen.watch_step(event or Ticked(), list(effects), wall)  # type: ignore[arg-type]


def test_a_round_becomes_its_bars() -> None:
    """Push, wait and pull of its cluster; window, apply and persist of the run; and one row with their seconds."""
    seen = PageMemory()
    see(seen, 10.0, note("push_granted", push=WEST, base="v0@r0"))
    see(seen, 12.0, note("push_committed", push=WEST), note("round_opened", round=1))
    see(seen, 13.0, note("round_applying", round=1))
    see(seen, 13.5, note("round_persisting", round=1))
    see(seen, 14.0, version(1))
    see(seen, 15.0, event=PullFinished(0, PullId("west", 1, 3), True))
    bars = [(s.lane, s.kind, s.begin, s.end) for s in seen.spans.list_spans(0.0)]
    assert bars == [
        ("west", SpanKind.PUSH, 10.0, 12.0),
        (RUN_LANE, SpanKind.WINDOW, 12.0, 13.0),
        (RUN_LANE, SpanKind.APPLY, 13.0, 13.5),
        (RUN_LANE, SpanKind.PERSIST, 13.5, 14.0),
        ("west", SpanKind.WAIT, 12.0, 14.0),
        ("west", SpanKind.PULL, 14.0, 15.0),
    ]
    [row] = seen.rounds
    assert (str(row.round.version), row.phases) == ("v1@r1", {"window": 1.0, "apply": 0.5, "persist": 0.5})
    assert seen.head_at == 14.0 and seen.curves.run.list_points() == [CurvePoint(100, 14.0, (2.0, 1.0, None))]
    assert seen.curves.clusters["west"].list_points() == [CurvePoint(100, 14.0, (2.0, 0.5, 5, None))]


def test_a_skipped_round_is_drawn_as_broken_and_its_cluster_trains_on() -> None:
    """No pull follows it, and who was skipped and why is kept."""
    seen = PageMemory()
    see(seen, 1.0, note("push_granted", push=WEST), note("round_opened", round=4))
    see(seen, 2.0, note("push_committed", push=WEST))
    row = outcome(OutcomeKind.SKIPPED, "ps1 is lost")
    see(seen, 3.0, RoundEnded(4, RoundResult.SKIPPED, "ps1 is lost", (row,), (), 0.0), note("round_skipped", round=4))
    assert [s.broken for s in seen.spans.list_spans(0.0)] == [False, True, True]
    assert seen.spans.open_kind("west") is None
    [rejected] = seen.rejections.values()
    assert (rejected.who, rejected.what, rejected.why) == ("west", "skipped in round 4", "ps1 is lost")


def test_a_rollback_takes_points_from_the_curve() -> None:
    """The lineage has only so many tokens now, and the next version goes on from there."""
    seen = PageMemory()
    for n in (1, 2, 3):
        see(seen, float(n), version(n, loss=5.0 - n))
    before = seen.curves.revision
    see(seen, 4.0, RolledBack(VersionId(1, 1), (VersionId(2, 2), VersionId(3, 3)), "ps1 came back without", 0.0))
    assert [p.tokens for p in seen.curves.run.list_points()] == [100] and seen.curves.revision > before
    gated = (outcome(OutcomeKind.GATED),)
    see(seen, 5.0, RoundEnded(4, RoundResult.UNCHANGED, "", gated, (), 0.0), version(5, loss=1.0, after=1))
    assert [p.tokens for p in seen.curves.run.list_points()] == [100, 200]
    assert [p.tokens for p in seen.curves.clusters["west"].list_points()] == [100, 100, 200]


def test_a_rollback_is_said_of_the_rounds_that_it_undid() -> None:
    """As a master that starts later says it of the same rounds, from its ledger."""
    seen = PageMemory()
    for n in (1, 2, 3):
        see(seen, float(n), version(n))
    see(seen, 4.0, RolledBack(VersionId(1, 1), (VersionId(2, 2), VersionId(3, 3)), "ps1 came back without", 0.0))
    assert [ended.round.undone for ended in seen.rounds] == [None, *["ps1 came back without"] * 2]


def test_a_master_that_starts_again_goes_on_with_the_curve() -> None:
    """With its ledger's newest rounds, behind the tokens of all before them; one that was skipped made no version."""
    v3, v4, v5 = (VersionId(n, n) for n in (3, 4, 5))
    seen, skipped = PageMemory(), replace(applied(v5, v4, None), version=None, parent=None, kind="skipped", folds=())
    seen.begin_lineage(VersionId(2, 2), 800)
    for r in (applied(v3, VersionId(2, 2), None), applied(v4, v3, None), skipped):
        seen.recall_round(r)
    assert [p.tokens for p in seen.curves.run.list_points()] == [900, 1000]
    see(seen, 5.0, version(6, after=4))
    assert [p.tokens for p in seen.curves.run.list_points()] == [900, 1000, 1100]
    new = PageMemory()
    new.begin_lineage(GENESIS, 0)
    new.recall_round(applied(VersionId(1, 1), GENESIS, None))
    assert [p.tokens for p in new.curves.run.list_points()] == [100]


def test_who_may_not_join_is_kept_once_and_counted() -> None:
    """With the reason; whoever only has to ask again is nobody's news."""
    seen, joined = PageMemory(), ClusterJoined(1, "west", "n", "run", "m", "c")
    for wall in (1.0, 2.0, 3.0):
        see(seen, wall, Reply(1, Failed(DifferentModel, "this model is not the run's")), event=joined)
        see(seen, wall, Reply(1, Failed(UnavailableMaster, "not yet registered: ps0")), event=joined)
    [rejected] = seen.rejections.values()
    assert (rejected.who, rejected.what, rejected.times, rejected.at) == ("west", "may not join", 3, 3.0)


def test_everything_is_bounded() -> None:
    """However many clusters, rounds, notes and refusals there are."""
    seen = PageMemory()
    for n in range(1, 6000):
        push = PushId(f"c{n}", 1, 1)
        see(seen, float(n), note("push_granted", push=push), note("cluster_joined", cluster=f"c{n}", head="v0@r0"))
        see(seen, n + 0.5, note("round_opened", round=n), version(n))
        rejected = outcome(OutcomeKind.GATED, f"score {n}", push)
        see(seen, n + 0.7, RoundEnded(n, RoundResult.UNCHANGED, "", (rejected,), (), 0.0))
    assert len(seen.events) == memory.EVENTS_KEPT and len(seen.rounds) == memory.ROUNDS_KEPT
    assert len(seen.rejections) == memory.REJECTIONS_KEPT
    assert len(seen.spans.list_spans(0.0)) <= memory.SPANS_KEPT + memory.MOST_OPEN
    assert len(seen.curves.clusters) == curves.MOST_CURVES
    assert len(seen.curves.run.list_points()) <= curves.MOST_POINTS + curves.RECENT_POINTS


def test_a_full_curve_keeps_its_shape() -> None:
    """The newest points stay as they are; older neighbours are averaged, each column by itself."""
    curve = curves.Curve()
    for n in range(1, 10_001):
        curve.add_point(n, float(n), (10.0 - n / 1000, float(n) if n % 2 else None))
    points = curve.list_points()
    recent = points[-curves.RECENT_POINTS :]
    assert [p.tokens for p in recent] == list(range(10_001 - curves.RECENT_POINTS, 10_001))
    assert curves.MOST_POINTS / 2 <= len(points) - len(recent) <= curves.MOST_POINTS
    assert sum(p.rounds for p in points) == 10_000 and points[-1].tokens == 10_000
    mean = sum((p.values[0] or 0.0) * p.rounds for p in points) / 10_000
    assert abs(mean - (10.0 - 10_001 / 2000)) < 1e-9
    assert all((a.values[0] or 0.0) > (b.values[0] or 0.0) for a, b in pairwise(points))
    assert all(p.values[1] is not None for p in points if p.rounds > 1)


def test_what_no_event_ended_is_ended() -> None:
    """A pull past its deadline has no event of its own; the cluster's state tells."""
    book = SpanBook()
    book.begin_span("west", SpanKind.PULL, 1.0)
    book.begin_span("east", SpanKind.PUSH, 1.0)
    book.end_others({"east": SpanKind.PUSH}, 5.0)
    assert book.open_kind("west") is None and book.open_kind("east") is SpanKind.PUSH
    assert [(s.lane, s.end) for s in book.list_spans(0.0)] == [("west", 5.0), ("east", None)]


def test_notes_become_lines() -> None:
    """By kind, a missing field as a dash; an unknown kind by its own words; what is routine is none."""
    gated = describe_note("push_gated", {"push": "west/3#17", "reason": "norm 9 above 3"}, 1.0)
    assert gated is not None
    assert (gated.severity, gated.who, gated.what) == (Severity.ATTENTION, "west", "push gated: norm 9 above 3")
    left = describe_note("cluster_gone", {"cluster": "west", "cause": "left", "reason": "so long"}, 1.0)
    assert left is not None and left.severity is Severity.PLAIN
    torn = describe_note("slave_lost", {"slave": "ps0"}, 1.0)
    assert torn is not None and torn.what == "is lost: –"
    new = describe_note("tuned_window", {"from": "1", "to": "{2}"}, 1.0)
    assert new is not None and new.what == "tuned window: from 1, to {2}"
    assert describe_note("push_granted", {}, 1.0) is None
