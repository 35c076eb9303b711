"""Pushes that keep their slots until the others of their round are folded, so that the gate `direction` compares them
with the whole sum: those of clusters that have just joined or were out of line, and those that turn out to point away
from the sum.

They block no other push: when the window is over, or another push needs a slot and none is free, the one that was least
out of line is measured and judged against the pushes folded so far.
"""

from __future__ import annotations

from dips.protocol import window
from dips.protocol.entities import Push, Round
from dips.protocol.enums import GateName
from dips.protocol.gates.direction import is_against
from dips.protocol.run_state import RunState


def hold_if_due(run: RunState, r: Round, push: Push) -> bool:
    """Before it is measured: hold a push that should be judged last; return whether it is held."""
    live = [c.name for c in run.clusters.values() if c.live]
    if push.was_held or not run.penalty.waits_for_others(push.id.cluster, live):
        return False
    _hold(run, r, push, "has joined lately or was out of line")
    return True


def hold_if_against(run: RunState, r: Round, push: Push) -> bool:
    """After it was measured: hold a push that points away from those before it, once; return whether it is held."""
    assert push.verdict is not None
    undecided = push.verdict.accepted or push.verdict.gate is GateName.DIRECTION
    if push.was_held or not run.penalty.gates_direction or not undecided or not is_against(push.verdict.evidence):
        return False
    reason, push.verdict, push.was_against = push.verdict.reason, None, True
    _hold(run, r, push, reason)
    return True


def take_held(run: RunState, r: Round) -> Push | None:
    """Return the held push that is to be judged now; None while all can wait, or if there is none."""
    if not r.held or not (window.is_over(run, r) or _slot_is_wanted(run)):
        return None
    push = min(r.held, key=lambda p: run.penalty.suspicion_of(p.id.cluster))
    r.held.remove(push)
    push.was_held = True
    return push


def _hold(run: RunState, r: Round, push: Push, reason: str) -> None:
    r.held.append(push)
    run.emit_note("push_held", push=push.id, reason=reason)


def let_go(r: Round) -> list[Push]:
    """Return the held pushes of a skipped round; they wait for the next round, which decides anew."""
    held, r.held = r.held, []
    for push in held:
        push.was_against = False
    return held


def count_against(r: Round) -> int:
    """Return how many pushes of the round wait because they point away from its sum, the one being judged included."""
    current = [r.current] if r.current is not None else []
    return sum(push.was_against for push in (*r.held, *current))


def _slot_is_wanted(run: RunState) -> bool:
    free = run.roster.slots - len(run.transfers.pushes)
    return free <= 0 and run.slot_queue.count_waiting(run.now) > 0
