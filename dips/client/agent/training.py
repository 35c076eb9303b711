"""The trainer's reports of inner steps and data ranges, and remarks on training in vain."""

from __future__ import annotations

from collections.abc import Iterable

from dips.client.agent.state import STANDSTILL, AgentState, SyncPhase, drop_remark, make_remark
from dips.client.ipc.messages import (
    ErrorReply,
    InsideChanged,
    LossReported,
    PipelineReported,
    Remarked,
    Stepped,
    TokensCounted,
)
from dips.errors import ConfigError
from dips.protocol.data import BegunRange
from dips.protocol.enums import OutcomeKind, RemarkSubject
from dips.protocol.heartbeats import REMARK_CHARS

# ---- recalls --------------------------------------------------------------------------------------------------------
# Must stay true: a range is used up when all its samples are in the carried progress; lost samples are served again,
# from the point where settled pushes end.


def use_ranges(s: AgentState, left: Iterable[int], begun: BegunRange | None) -> None:
    """Count all served ranges but `left` as used up, and `begun` as partly trained.

    Ranges leased to a former incarnation, or taken back meanwhile, are not counted.
    """
    s.range_requests.by_step = True
    for used in s.ranges.finish_ranges(left):
        s.account.use_up(used)
    if begun is not None and begun.number in s.ranges.served:
        s.account.begin_range(begun)


def lose_work(s: AgentState) -> None:
    """Drop the progress since the last freeze and serve its ranges to the running trainer again."""
    lost = s.account.carried.inner_steps > 0
    s.ranges.take_back_unserved(s.account.lose_carried())
    if lost and s.range_requests.by_step and s.ranges.served:
        s.ranges.recall_ranges()
        count_recall(s)


def count_recall(s: AgentState) -> None:
    """Tell the trainer, with the next answers, to forget its ranges."""
    s.range_requests.recalls += s.range_requests.by_step


# ---- training -------------------------------------------------------------------------------------------------------


MARK_EVERY_S = 0.5  # shortest time between two marks of inner steps on the timeline


def record_step(s: AgentState, notice: Stepped) -> None:
    """Count one or more inner steps that the trainer reports."""
    trainer, steps = s.trainer, max(1, notice.steps)
    trainer.inner_steps += steps
    s.pace.record_step(s.now - max(0.0, notice.ago_s), steps, notice.span_s)
    trainer.tokens += notice.tokens
    s.tally.tokens += notice.tokens
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
    s.tally.tokens += notice.tokens
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


ROUTINE = "sync"  # a change inside the cluster that is as it should be: in the timeline, not in the status


def take_pipeline(s: AgentState, notice: PipelineReported) -> None:
    """Keep how a pipeline's last step was played, and write it to the timeline."""
    s.trainer.pipeline = notice
    stages = [
        {
            "seconds": {work: round(seconds, 6) for work, seconds in stage.seconds.items()},
            "idle": {cause: round(seconds, 6) for cause, seconds in stage.idle.items()},
            "peak_bytes": dict(stage.peak_bytes),
        }
        for stage in notice.stages
    ]
    s.record_mark("pipeline", gear=notice.gear, step_s=notice.step_s, idle=round(notice.idle, 4), stages=stages)


def take_change(s: AgentState, notice: InsideChanged) -> None:
    """Remark on a new gear or plan, or on replicas that were corrected; keep why the ranks end, if they do."""
    t = s.trainer
    if notice.what == ROUTINE:
        s.record_mark("mesh_sync", text=notice.why)
        drop_remark(s, RemarkSubject.INSIDE)  # what the sync before had to correct
    else:
        make_remark(s, RemarkSubject.INSIDE, notice.why[:REMARK_CHARS])
    if notice.restarts:
        t.restarts_for = notice.why
    else:
        t.inside_changes[notice.what] = t.inside_changes.get(notice.what, 0) + 1


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
    if s.sync.waiting and s.sync.stands:
        return STANDSTILL[s.sync.phase]
    if trainer.starved:
        return "data"
    return "start" if trainer.base is None else "inner"


# ---- in vain --------------------------------------------------------------------------------------------------------


NO_STEP_S = 120.0  # without an inner step, as at the master: building and compiling a model may take as long

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
