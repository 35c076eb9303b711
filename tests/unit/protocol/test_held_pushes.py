"""Pushes that wait for the others of their round, as a whole Coordinator decides it: vectors instead of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dips.errors import LocalProtocolError
from dips.ids import GENESIS, PushId
from dips.protocol import events as ev
from dips.protocol.effects import Apply, Fold, Measure, Note
from dips.protocol.entities import Push, Round
from dips.protocol.enums import GateName, OutcomeKind, RoundState
from dips.protocol.options import Options, PenaltyOptions, TimingOptions
from dips.protocol.round import count_against, let_go
from tests.unit.protocol.scripted_run import ScriptedRun

GOOD, BAD = (1.0, 0.2), (-0.5, 0.1)


class VectorRun(ScriptedRun):
    """A pseudo-gradient is two numbers; the slave measures and folds them."""

    def __init__(self, *gates: str, slots: int = 4, warmup: int = 2) -> None:
        penalty = PenaltyOptions(gates=tuple(map(GateName, gates or ("direction",))), warmup_rounds=warmup)
        self.vectors: dict[str, tuple[float, float]] = {}
        self.digests: dict[str, int] = {}  # of clusters that push the same again and again
        self.theta_digest = 0  # of what the slave makes
        self.acc, self.folds, self._pushed = (0.0, 0.0), 0, 1000
        super().__init__(Options(penalty=penalty, timing=TimingOptions(window_s=10.0)), slots)

    def _answer(self, body: Any) -> Any:
        d = self.vectors.get(body.push.cluster, GOOD) if isinstance(body, Measure | Fold) else GOOD
        match body:
            case Measure():
                dot = d[0] * self.acc[0] + d[1] * self.acc[1] if self.folds else 0.0
                return ev.Measured((d[0] ** 2 + d[1] ** 2,), True, (dot,), self._digest(body.push.cluster))
            case Fold():
                before = self.acc if self.folds else (0.0, 0.0)
                self.acc = (before[0] + body.weight * d[0], before[1] + body.weight * d[1])
                self.folds += 1
                return ev.Folded((self.acc[0] ** 2 + self.acc[1] ** 2,))
            case Apply():
                self.folds = 0
                return ev.Prepared(body.version, digest=self.theta_digest)
        return super()._answer(body)

    def _digest(self, cluster: str) -> int:
        self._pushed += 1
        return self.digests.get(cluster, self._pushed)

    def measured(self) -> list[str]:
        """Clusters in the order of all Measures so far."""
        return [body.push.cluster for body in self.all_of(Measure)]

    def round(self, *clusters: str) -> dict[str, OutcomeKind]:
        """Each pushes in turn; the window ends; return what became of each."""
        pushes = [push for cluster in clusters if (push := self.try_push(cluster)) is not None]
        self.wait(11.0)
        return {push.cluster: self.outcome(push).kind for push in pushes}

    def try_push(self, cluster: str) -> PushId | None:
        """Push, with a second try where the first makes room; None: there is none, as for a quarantined cluster."""
        push = self.next_push(cluster)
        for _ in range(2):
            self.ask(ev.PushRequested(0, push, self.head, 1))
        if push not in self.machine._run.transfers.pushes:
            return None
        self.commit(push)
        return push

    def warm_up(self, *clusters: str, rounds: int = 3) -> VectorRun:
        self.train(*clusters)
        for _ in range(rounds):
            assert set(self.round(*clusters).values()) == {OutcomeKind.ACCEPTED}
        return self


def test_a_joiner_is_measured_beside_all_the_others() -> None:
    """It commits first and is folded last, so that the sum that it is compared with is everybody else."""
    run = VectorRun().warm_up("a", "b", "c")
    run.train("new")
    run.vectors["new"] = BAD
    before = len(run.measured())
    said = run.round("new", "a", "b", "c")
    assert run.measured()[before:] == ["a", "b", "c", "new"]
    assert said == {"a": "accepted", "b": "accepted", "c": "accepted", "new": "gated"}
    reason = next(o.reason for o in run.committed[-1].outcomes if o.push.cluster == "new")
    assert reason == "cosine -0.92 with the sum of 3 others of its round"


def test_who_always_was_unlike_the_others_is_flagged_in_the_view() -> None:
    """No push of it is gated; status and page get a sentence with the numbers, and nobody else's row has one."""
    run = VectorRun().warm_up("a", "b", "c", "d")
    run.vectors["d"] = (-0.2, 1.0)
    for number in range(24):
        order = "abcd"[number % 4 :] + "abcd"[: number % 4]  # who comes first has no others to be compared with
        assert set(run.round(*order).values()) == {OutcomeKind.ACCEPTED}
    differs = {name: row.differs for name, row in run.view.clusters.items()}
    assert [list(differs[c]) for c in "abcd"] == [[], [], [], ["direction"]]
    assert "data of another kind" in differs["d"]["direction"]


def test_a_bad_push_that_came_first_is_found_in_the_next_round() -> None:
    """It is folded before anybody can speak against it; from then on it waits for the others, and is gated."""
    run = VectorRun().warm_up("a", "b", "c", "d")
    run.vectors["a"] = BAD
    first = run.round("a", "b", "c", "d")
    assert set(first.values()) == {OutcomeKind.ACCEPTED}, "no healthy one is outvoted by the bad one and its victim"
    for _ in range(5):
        said = run.round("a", "b", "c", "d")
        assert said == {"a": "gated", "b": "accepted", "c": "accepted", "d": "accepted"}
    del run.vectors["a"]
    assert set(run.round("a", "b", "c", "d").values()) == {OutcomeKind.ACCEPTED}


def test_a_bad_push_that_came_later_is_gated_at_once() -> None:
    run = VectorRun().warm_up("a", "b", "c", "d")
    run.vectors["d"] = BAD
    assert run.round("a", "b", "c", "d")["d"] is OutcomeKind.GATED


def test_two_bad_of_nine_are_gated_whatever_their_order() -> None:
    """They agree with each other, and are fewer."""
    names = "abcdefghi"
    run = VectorRun(slots=9).warm_up(*names)
    run.vectors |= dict.fromkeys("ab", BAD)
    gated: list[str] = []
    for number in range(6):
        order = names[number:] + names[:number]
        said = run.round(*order)
        gated += [c for c, kind in said.items() if kind is OutcomeKind.GATED]
    assert set(gated) == {"a", "b"} and len(gated) >= 2 * 5


def test_two_of_four_that_come_first_outvote_nobody() -> None:
    """Two against two: as many wait and point away as were folded. All are flagged."""
    run = VectorRun().warm_up("a", "b", "c", "d")
    run.vectors |= dict.fromkeys("ab", BAD)
    assert set(run.round("a", "b", "c", "d").values()) == {OutcomeKind.ACCEPTED}


def test_two_clusters_cannot_outvote_each_other() -> None:
    """Both are flagged in every round, and both count."""
    run = VectorRun().warm_up("a", "b")
    run.vectors["b"] = BAD
    for _ in range(4):
        assert set(run.round("a", "b").values()) == {OutcomeKind.ACCEPTED}
    flagged = [e for e in run.effects if isinstance(e, Note) and e.kind == "push_flagged"]
    assert len(flagged) == 4


def test_a_held_push_gives_its_slot_to_who_wants_it() -> None:
    """Two slots, one of them held: as soon as another cluster asks in vain, what is held is judged by what is there."""
    run = VectorRun(slots=2).warm_up("a", "b")
    run.train("new", "c")
    held = run.push("new")
    pushed = run.open_push("a")
    assert "new" not in run.measured()
    asked = run.next_push("c")
    run.ask(ev.PushRequested(0, asked, run.head, 1))
    assert "new" in run.measured()
    run.ask(ev.PushRequested(0, asked, run.head, 1))
    assert asked in run.machine._run.transfers.pushes
    run.commit(pushed)
    run.commit(asked)
    run.wait(11.0)
    assert run.outcome(held).kind is OutcomeKind.ACCEPTED


def test_a_window_whose_pushes_all_wait_ends_in_time() -> None:
    """Everybody is suspected: at the window's end they are measured, who was least out of line first."""
    run = VectorRun().warm_up("a", "b", "c")
    for cluster, suspicion in (("a", 4.0), ("b", 2.0), ("c", 1.0)):
        row = run.machine._run.penalty.penalty_row(cluster)
        rows = {cluster: replace(row, suspicion=suspicion)}
        run.machine._run.penalty.keep_statistics(rows, run.machine._run.penalty.history)
    before = len(run.measured())
    pushes = [run.push(c) for c in "abc"]
    run.wait(11.0)
    assert run.measured()[before:] == ["c", "b", "a"]
    assert {run.outcome(p).kind for p in pushes} == {OutcomeKind.ACCEPTED}


def test_a_skipped_round_keeps_those_that_wait_for_the_next() -> None:
    """A slave fails the fold: the held push is not lost, and is judged in the next round."""
    run = VectorRun().warm_up("a", "b")
    run.train("new")
    held = run.push("new")
    run.held.add(Fold)
    other = run.push("a")
    order = next(o for o in run.orders if isinstance(o.body, Fold))
    run.orders.remove(order)
    run.held.clear()
    run.step(ev.OrderFailed(order.slave, order.sinc, order.number, LocalProtocolError, "broken"))
    run.folds = 0
    run.wait(11.0)
    assert run.outcome(other).kind is OutcomeKind.SKIPPED
    run.wait(11.0)
    assert run.outcome(held).kind is OutcomeKind.ACCEPTED


def test_two_of_nine_that_come_first_cannot_keep_the_others_out() -> None:
    """They agree, and there are two slots only: nobody else can wait for long. The others are flagged, never gated."""
    names = "abcdefghi"
    run = VectorRun(slots=2).warm_up(*names, rounds=0)
    for _ in range(3):
        assert set(run.round(*names).values()) == {OutcomeKind.ACCEPTED}
    run.vectors |= dict.fromkeys("ab", BAD)
    gated = [c for _ in range(6) for c, kind in run.round(*names).items() if kind is OutcomeKind.GATED]
    assert set(gated) <= {"a", "b"}


@pytest.mark.parametrize("gates", [("dips",), ("edit", "loss", "replay")])
def test_nobody_waits_without_the_gate_that_needs_it(gates: tuple[str, ...]) -> None:
    run = VectorRun(*gates).warm_up("a", "b")
    run.train("new")
    run.vectors["new"] = BAD
    run.push("new")
    assert run.measured()[-1] == "new"


def test_a_replayed_push_is_gated_and_its_version_knows() -> None:
    """A trainer that pushes the same parameters in every round: once they count."""
    run = VectorRun("replay").warm_up("a", "b")
    run.digests["b"] = 7
    assert [run.round("a", "b")["b"] for _ in range(3)] == ["accepted", "gated", "gated"]
    reasons = [o.reason for row in run.committed for o in row.outcomes if o.push.cluster == "b"]
    assert reasons[-1].startswith("its parameters are those of a push that was accepted")
    assert run.committed[-1].history.digests.count(7) == 1


def test_a_push_that_is_a_version_as_it_was_pulled_is_gated() -> None:
    """A trainer that learns nothing, though others moved θ meanwhile and its d is as long as theirs."""
    run = VectorRun("replay").warm_up("a", "b")
    run.theta_digest = 77
    assert run.round("a") == {"a": OutcomeKind.ACCEPTED}
    run.theta_digest, run.digests["b"] = 78, 77
    assert run.round("a", "b") == {"a": OutcomeKind.ACCEPTED, "b": OutcomeKind.GATED}
    assert run.committed[-1].history.digests[-1] == 78


def test_a_gated_push_s_slot_is_free_at_once() -> None:
    """Its round goes on, and has room for another cluster's push."""
    run = VectorRun(slots=1).warm_up("a", "b", "c", "d", "e")
    run.vectors["d"] = BAD
    pushes = {name: run.try_push(name) for name in "abcde"}
    assert None not in pushes.values()
    run.wait(11.0)
    kinds = {name: run.outcome(push).kind for name, push in pushes.items() if push is not None}
    assert kinds == dict.fromkeys("abce", OutcomeKind.ACCEPTED) | {"d": OutcomeKind.GATED}


def test_a_third_that_is_folded_first_does_not_keep_the_majority_out() -> None:
    """Four of nine are bad and are folded first, enough to gate; but all that they would gate wait, and are more."""
    names = "abcdefghi"
    run = VectorRun(slots=9).warm_up(*names)
    run.vectors |= dict.fromkeys("abcd", BAD)
    assert set(run.round(*names).values()) == {OutcomeKind.ACCEPTED}


def test_a_sum_at_odds_with_itself_gates_nobody() -> None:
    """`b` points away from `a`, and must be folded at once for `d` to have its slot: nobody knows which of them is
    right, although those that come later agree.
    """
    run = VectorRun(slots=1).warm_up("a", "b", "c", "d", "e")
    run.vectors |= dict.fromkeys("bc", BAD)
    pushes = [run.push("a"), run.push("b")]
    for cluster in "de":
        push = run.try_push(cluster)
        assert push is not None
        pushes.append(push)
    pushes.append(run.push("c"))
    run.wait(11.0)
    assert {run.outcome(push).kind for push in pushes} == {OutcomeKind.ACCEPTED}
    flagged = [dict(e.fields)["reason"] for e in run.effects if isinstance(e, Note) and e.kind == "push_flagged"]
    assert "which are at odds themselves" in flagged[-1]


def test_who_pointed_away_in_a_skipped_round_is_not_counted_in_the_next() -> None:
    """Its sum is another: a push that waits there for another reason must not speak for one that is judged."""
    push = Push(PushId("a", 1, 1), GENESIS, 1, 0.0, 0.0)
    push.was_against = True
    skipped = Round(1, RoundState.COLLECTING, "", 0.0, 1.0, held=[push])
    assert count_against(skipped) == 1
    assert let_go(skipped) == [push] and skipped.held == []
    assert count_against(Round(2, RoundState.COLLECTING, "", 0.0, 1.0, held=[push])) == 0
