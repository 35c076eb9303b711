"""`outer.anchor: base`: a late push goes from what its cluster had pulled, while that is held; else it is said."""

from __future__ import annotations

import numpy as np
import pytest

from dips.ids import GENESIS, VersionId
from dips.master.meters import RoundMeters
from dips.protocol import events as ev
from dips.protocol.anchors import choose_anchor, explain_anchor
from dips.protocol.effects import Measure, Note, Order
from dips.protocol.entities import Push
from dips.protocol.options import OuterOptions
from tests import rules_reference
from tests.unit.protocol.ruled_run import BUFFERS, PLAIN, RuledRun, draw_difference

MU, LR = 0.8, 0.7
V1 = VersionId(1, 1)


def late_push(pinned: int = 1, **outer: object) -> tuple[RuledRun, list[np.ndarray], list[np.ndarray], ev.PushId]:
    """a's push makes v1 while b's, from v0, is under way; the run after b's round, θ of v1 and θ_b."""
    run = RuledRun(OuterOptions(**{**PLAIN, **outer}), pinned)  # type: ignore[arg-type]
    run.staged = {"a": draw_difference(1), "b": draw_difference(2)}
    run.train("a", "b")
    late = run.open_push("b", GENESIS)
    theta_b = [a.copy() for a in run.memory.slot_arrays(late).values()]
    run.push("a", 100)
    run.wait(11.0)
    theta = run.theta
    run.commit(late, 50, 4)
    run.wait(11.0)
    return run, theta, theta_b, late


def expected_theta(anchor: str, theta: np.ndarray, theta_b: np.ndarray, first: np.ndarray) -> list[float]:
    """θ of v2 in one layer: m of v1 is a's difference, for its round was the first."""
    g = rules_reference.pseudo_gradient(anchor, list(theta), [1.0] * 8, list(theta_b))
    numbers = rules_reference.nesterov(MU, 1.0, True)
    pairs = zip(theta, first, g, strict=True)
    return [rules_reference.take_step(float(t), float(m), x, LR, numbers)[0] for t, m, x in pairs]


@pytest.mark.parametrize("anchor", ["base", "current"])
def test_a_late_push_goes_from_its_anchor(anchor: str) -> None:
    """θ′ of every stepped layer is the reference's; buffers are averaged, whatever the anchor."""
    run, theta, theta_b, _ = late_push(anchor=anchor)
    for layer in range(BUFFERS):
        made = expected_theta(anchor, theta[layer], theta_b[layer], run.staged["a"][layer])
        assert run.theta[layer] == pytest.approx(made, rel=1e-5), f"layer {layer}"
    assert run.theta[BUFFERS] == pytest.approx(theta_b[BUFFERS], rel=1e-6)


def test_the_row_and_the_outcome_say_so() -> None:
    """The row names no rule, only what was subtracted from; the norm is that of the difference to it."""
    run, _, theta_b, late = late_push(anchor="base")
    (fold,) = run.committed[-1].folds
    assert (fold.base, fold.anchored, fold.push) == (GENESIS, True, late)
    norm = sum(rules_reference.norm_of(list(1.0 - t)) for t in theta_b[:BUFFERS]) / 2
    assert fold.norm == pytest.approx(norm, rel=1e-5)
    assert run.ask(ev.RoundAwaited(0, late)).reason.endswith("; against its base v0@r0")
    assert not run.committed[0].folds[0].anchored  # its base was the head: there was nothing to choose


def test_a_base_that_is_not_held_any_more() -> None:
    """Without a pinned bank no older version is held: the present θ, a note, a count, and the outcome says why."""
    run, theta, theta_b, late = late_push(pinned=0, anchor="base")
    assert not run.committed[-1].folds[0].anchored
    made = expected_theta("current", theta[0], theta_b[0], run.staged["a"][0])
    assert run.theta[0] == pytest.approx(made, rel=1e-5)
    (note,) = [e for e in run.effects if isinstance(e, Note) and e.kind == "push_unanchored"]
    assert dict(note.fields) == {"push": str(late), "base": "v0@r0", "reason": "no longer held by s"}
    assert run.ask(ev.RoundAwaited(0, late)).reason.endswith("; against v1@r1, not its base v0@r0, no longer held by s")
    meters = RoundMeters()
    meters.on_note(note.kind, dict(note.fields), 0.0)
    assert meters.unanchored == 1


def test_with_anchor_current_slaves_are_asked_for_nothing() -> None:
    """No Measure names an older version, and none is kept."""
    run, _, _, _ = late_push(anchor="current")
    measured = [e.body for e in run.effects if isinstance(e, Order) and isinstance(e.body, Measure)]
    assert len(measured) == 2 and all(order.anchor is None for order in measured)
    assert not run.memory.held.is_older(V1)


@pytest.mark.parametrize(("base", "reason"), [(VersionId(1, 9), "which is no ancestor of it"), (GENESIS, "")])
def test_a_base_of_another_lineage_is_not_asked_for(base: VersionId, reason: str) -> None:
    """It was rolled back; and what was decided for a push stays so, in whatever round it is measured again."""
    run, _, _, late = late_push(anchor="base")
    push = Push(late, base, 1, 0.0, 0.0)
    assert choose_anchor(run.machine._run, push) == (None if reason else GENESIS)
    assert explain_anchor(push).endswith(reason or "its base v0@r0")
    push.why_unanchored = push.why_unanchored or "against v1@r1: as was decided"
    assert choose_anchor(run.machine._run, push) is None
    assert explain_anchor(push) == push.why_unanchored
