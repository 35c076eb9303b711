"""Remarks on training without effect: no steps, no tokens, no accepted push. Each remark names its remedy."""

from __future__ import annotations

from dips.client.agent.phases import SyncPhase
from dips.client.agent.remarks import drop_remark, make_remark
from dips.client.agent.state import AgentState
from dips.client.ipc.messages import ErrorReply
from dips.errors import ConfigError
from dips.protocol.enums import OutcomeKind, RemarkSubject

NO_STEP_S = 120.0  # without an inner step, as `hang_s`: building and compiling a model may take as long

CALL_STEP = "call outer.step(local_tokens=…) after each optimizer step"
COUNT_TOKENS = (
    "give outer.step(local_tokens=…), those of this rank's part of the batch, or tokens=…, those of the whole cluster: "
    "pushes count by them"
)


def look_for_steps(s: AgentState) -> None:
    """Remark on a trainer that has parameters, waits for nothing, and reports no step."""
    t = s.trainer
    trains = t.alive and t.base is not None and not s.sync.waiting and not t.starved
    if not trains or t.inner_steps > t.steps_before or s.sync.phase is SyncPhase.JOINING:
        t.idle_since = s.now
    elif s.now - t.idle_since >= NO_STEP_S:
        make_remark(s, RemarkSubject.STEPS, f"no inner step reported in {NO_STEP_S:.0f} s: {CALL_STEP}")


def look_at_step(s: AgentState) -> None:
    """Drop the remark on missing steps, since a step was reported."""
    drop_remark(s, RemarkSubject.STEPS)


def refuse_uncounted(s: AgentState) -> ErrorReply | None:
    """End training if a push is due and no step has ever reported tokens, since the push would be gated."""
    if s.account.carried.inner_steps and not s.account.carried.tokens and not s.trainer.tokens:
        s.fail_training(ConfigError(f"{s.account.carried.inner_steps} inner steps and no tokens: {COUNT_TOKENS}"))
        return s.failure
    return None


def look_at_freeze(s: AgentState) -> None:
    """Remark on a frozen push without tokens, or drop that remark."""
    if s.account.frozen.tokens:
        drop_remark(s, RemarkSubject.TOKENS)
    else:
        make_remark(s, RemarkSubject.TOKENS, f"its push brings no tokens: {COUNT_TOKENS}")


def look_at_outcome(s: AgentState, kind: OutcomeKind, reason: str) -> None:
    """Count an accepted push and drop the remarks that it makes obsolete; remark on a gated one."""
    if kind is OutcomeKind.ACCEPTED:
        s.trainer.accepted_pushes += 1
        drop_remark(s, RemarkSubject.CRASH)
        drop_remark(s, RemarkSubject.GATED)
    elif kind is OutcomeKind.GATED:
        make_remark(s, RemarkSubject.GATED, f"its push was gated: {reason}")


def look_at_end(s: AgentState) -> None:
    """Remark on a training command that ended with exit code 0 without one accepted push."""
    t = s.trainer
    if t.accepted_pushes or s.membership.progress.finished:
        return
    if not t.attempt:
        why = "it made no OuterLoop: make one of the model before training"
    elif not t.inner_steps:
        why = f"it reported no inner step: {CALL_STEP}"
    else:
        taken = f"{t.inner_steps} inner step{'s' * (t.inner_steps > 1)}"
        why = f"it took {taken}: train longer, call outer.push() at the end, or push more often (pace)"
    s.leaves_for = f"left without one accepted push: {why}"
    make_remark(s, RemarkSubject.END, f"the training command ended without one accepted push: {why}")
