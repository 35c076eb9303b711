"""The trainer's reports of inner steps, and the cause under which the cluster's time is counted."""

from __future__ import annotations

from dips.client.agent.in_vain import look_at_step
from dips.client.agent.phases import STANDSTILL
from dips.client.agent.recalls import lose_work, use_ranges
from dips.client.agent.remarks import make_remark
from dips.client.agent.state import AgentState
from dips.client.ipc.messages import LossReported, Remarked, Stepped, TokensCounted
from dips.protocol.enums import RemarkSubject
from dips.protocol.heartbeats import REMARK_CHARS

MARK_EVERY_S = 0.5  # shortest time between two marks of inner steps on the timeline


def record_step(s: AgentState, notice: Stepped) -> None:
    """Count one or more inner steps that the trainer reports."""
    trainer, steps = s.trainer, max(1, notice.steps)
    trainer.inner_steps += steps
    s.pace.record_step(s.now - max(0.0, notice.ago_s), steps, notice.span_s)
    trainer.tokens += notice.tokens
    s.tally.record_step(notice.tokens, s.now)
    look_at_step(s)
    trainer.loss = trainer.loss if notice.loss is None else notice.loss
    s.account.record_step(notice.tokens, notice.loss, steps, min(max(0, notice.losses), steps))
    if notice.left is not None:
        use_ranges(s, notice.left, notice.begun)
    _check_loss(s, notice.finite)
    if trainer.must_pull:  # the pull will overwrite this work
        lose_work(s)
    if s.now - trainer.marked_at >= MARK_EVERY_S:
        mark_inner_steps(s)


def record_tokens(s: AgentState, notice: TokensCounted) -> None:
    """Add tokens of steps that were counted without them, since other ranks or an accelerator have counted them."""
    s.trainer.tokens += notice.tokens
    s.tally.record_step(notice.tokens, s.now)
    s.account.add_tokens(notice.tokens)
    if s.trainer.must_pull:  # as in record_step
        lose_work(s)


def record_losses(s: AgentState, notice: LossReported) -> None:
    """Add losses of steps that were counted without one: rank 0 of a pipeline computes no loss."""
    if notice.losses:
        s.trainer.loss = notice.loss_sum / notice.losses
    s.account.add_losses(notice.loss_sum, notice.losses)
    _check_loss(s, notice.finite)


def take_remark(s: AgentState, notice: Remarked) -> None:
    """Keep a rank's remark for the operator."""
    make_remark(s, RemarkSubject.SCRIPT, notice.text[:REMARK_CHARS])


def _check_loss(s: AgentState, finite: bool) -> None:
    if not finite and not s.trainer.loss_not_finite:
        s.trainer.loss_not_finite = True
        s.record_mark("loss_not_finite", attempt=s.trainer.attempt, inner_steps=s.trainer.inner_steps)


def mark_inner_steps(s: AgentState) -> None:
    """Write the counters of inner steps to the timeline."""
    t = s.trainer
    t.marked_at = s.now
    s.record_mark("inner", attempt=t.attempt, inner_steps=t.inner_steps, tokens=t.tokens, loss=t.loss)


def name_cause(s: AgentState) -> str:
    """Return the cause (tally.CAUSES) under which the present time is counted."""
    trainer = s.trainer
    if not trainer.alive:
        return "ended" if trainer.detached else "failure" if trainer.attempt else "start"
    if s.sync.waiting and not s.trains_on:
        return STANDSTILL[s.sync.phase]
    if trainer.starved:
        return "data"
    return "start" if trainer.base is None else "inner"
