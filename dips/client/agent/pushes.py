"""The steps of a push: asked for, granted, frozen, moved, committed, and settled by the outcome of its round.

Must stay true: progress is cut when the ranks freeze the model, and settled, given back or lost exactly once.
"""

from __future__ import annotations

from dips.client.agent.actions import Channel
from dips.client.agent.divergence import judge_divergence
from dips.client.agent.in_vain import look_at_freeze, look_at_outcome
from dips.client.agent.phases import SyncPhase
from dips.client.agent.pulls import RETRY_S, close_pull, end_transfer, on_pull_granted
from dips.client.agent.questions import ask_master
from dips.client.agent.recalls import lose_work
from dips.client.agent.state import AgentState
from dips.client.agent.training import mark_inner_steps, name_cause
from dips.client.agent.transfers import begin_transfer, push_idle_s, record_moved
from dips.client.agent.verdicts import give_verdict, train_on
from dips.client.ipc.messages import PushMoved, PushResult
from dips.dataclass import replace
from dips.protocol.effects import Committed, Dropped, Finished, Grant, Outcome, Refused
from dips.protocol.enums import OutcomeKind
from dips.protocol.events import PushAborted, PushFinished, PushRequested, RoundAwaited

AGAIN_S = 1.0  # pause before a push that got no slot is asked for again: its slave is not back within a step


def ask_push(s: AgentState) -> None:
    sync = s.sync
    assert s.trainer.base is not None
    if not s.settings.overlap:
        s.pace.pause_timing()
    sync.seq, sync.moved = sync.seq + 1, (0, 0)
    sync.phase, sync.reason = SyncPhase.ASKING_PUSH, "it asks for a push"
    tokens, step_s, ranks = s.account.carried.tokens, s.pace.step_s, s.trainer.push_ranks
    keys, idle_s = s.trainer.keys[:ranks], push_idle_s(s)
    ask_master(s, Channel.SYNC, PushRequested(0, s.push_id, s.trainer.base, ranks, tokens, step_s, keys, idle_s))


def on_push_granted(s: AgentState, grant: Grant) -> None:
    """Note that slots are reserved; the ranks freeze the model at their next question."""
    sync = s.sync
    sync.phase, sync.reason, sync.grant, sync.place = SyncPhase.PUSHING, "its push is moving", grant, 0
    mark_inner_steps(s)
    sync.frozen = False


def freeze_push(s: AgentState) -> None:
    """Cut the progress at the point where the ranks freeze the model: work before it belongs to this push, later work
    does not.
    """
    sync = s.sync
    if sync.frozen:
        return
    sync.frozen, sync.frozen_by, s.trainer.loss_not_finite = True, s.trainer.attempt, False
    s.account.freeze_portion()
    look_at_freeze(s)
    s.heartbeats.due_at = s.now  # the heartbeat reports the push's tokens: the master compares the commit with them
    if s.settings.overlap:
        s.pace.restart_count(s.now)
    begin_transfer(s)
    s.record_mark("push_begin", seq=sync.seq, base=str(s.trainer.base), tokens=s.account.frozen.tokens)


def on_push_moved(s: AgentState, moved: PushMoved) -> None:
    """Ask the master to commit the push if all bytes are at the slaves; otherwise abort it, and the trainer trains
    on.
    """
    sync = s.sync
    s.record_mark("push_end", seq=moved.seq, ok=moved.ok, nbytes=moved.nbytes, reason=moved.reason)
    if moved.diverged:
        _heal_diverged(s, moved)
        return
    if not moved.ok:
        give_back(s)
        abort_push(s, f"its push failed: {moved.reason}")
        give_verdict(s, train_on(s, sync.reason))
        return
    s.trainer.resets = 0
    record_moved(s, moved.nbytes, moved.nbytes)
    s.tally.moved["push"] += moved.nbytes
    sync.phase, sync.reason = SyncPhase.FINISHING, "its push waits to be committed"
    p = s.account.frozen
    ask_master(s, Channel.SYNC, PushFinished(0, s.push_id, p.tokens, p.inner_steps, p.ranges, p.loss, p.begun))


def _heal_diverged(s: AgentState, moved: PushMoved) -> None:
    """Drop the work since the last pull, since the model is not finite, and schedule a pull of the head.

    With a policy other than `reset` the ranks end with an error, and the next attempt pulls.
    """
    s.ranges.take_back_unserved(s.account.lose_frozen())
    lose_work(s)
    s.trainer.must_pull = s.sync.pull_due = True
    abort_push(s, f"its model diverged: {moved.reason}", diverged=True)
    judge_divergence(s, moved.seq, s.sync.reason)


def on_push_refused(s: AgentState, result: Refused) -> None:
    s.sync.backoff_until = s.now + result.retry_after_s
    if result.place and result.place != s.sync.place:
        s.record_mark("waits_for_slot", place=result.place, waiting=result.waiting, reason=result.reason)
    s.sync.place = result.place
    if s.sync.waiting and not s.settings.overlap:  # with overlap no step was interrupted
        s.pace.begin_step(s.now)
    end_transfer(s, result.reason, again=True)


def on_committed(s: AgentState, _: Committed) -> None:
    s.sync.phase, s.sync.reason = SyncPhase.AWAITING, "its push is committed, the window is open"
    s.record_mark("window_begin", seq=s.sync.seq)
    ask_master(s, Channel.SYNC, RoundAwaited(0, s.push_id))


def on_outcome(s: AgentState, result: Outcome) -> None:
    """Settle the push by the outcome of its round, and pull the new version if the trainer waits for it."""
    sync = s.sync
    _mark_outcome(s, result.kind, str(result.version), result.reason)
    s.tally.switch_cause(name_cause(s), s.now)
    s.tally.count_update(result.update_s)
    s.update_progress(result.progress)
    if result.kind is OutcomeKind.SKIPPED:
        give_back(s)
        end_transfer(s, f"its round was skipped: {result.reason}")
        return
    settled = s.account.settle_outcome(result.kind)
    s.ranges.settle_part(settled.ranges, settled.begun)
    look_at_outcome(s, result.kind, result.reason)
    s.membership.settled += 1
    sync.accepted_seq = sync.seq if result.kind is OutcomeKind.ACCEPTED else sync.accepted_seq
    sync.pull_due = sync.waiting
    if result.pull is None:
        end_transfer(s, f"its push was {result.kind}")
    elif sync.waiting:
        on_pull_granted(s, result.pull, after_push=True)
    else:  # ranks that started since the push have keys that are not admitted to this pull: they ask for their own
        close_pull(s, False)


def on_push_dropped(s: AgentState, result: Dropped) -> None:
    """Give back the progress of a dropped push; one that was still being opened is asked for again soon."""
    sync = s.sync
    asking = sync.phase is SyncPhase.ASKING_PUSH
    if sync.phase in (SyncPhase.ASKING_PUSH, SyncPhase.FINISHING, SyncPhase.AWAITING):
        _mark_outcome(s, "dropped", "", result.reason)
    give_back(s)
    if asking:
        sync.backoff_until = s.now + AGAIN_S
    end_transfer(s, result.reason, again=asking, delay_s=RETRY_S)


def on_base_refused(s: AgentState, reason: str) -> None:
    """Schedule a pull and drop the work since the base, which the ledger does not know."""
    lose_work(s)
    s.trainer.must_pull = s.sync.pull_due = True
    end_transfer(s, reason)


def on_push_after_end(s: AgentState, result: Finished) -> None:
    """Give back the progress of a push that the run's end has preceded."""
    s.membership.progress = replace(s.membership.progress, finished=result.version)
    give_back(s)
    end_transfer(s, "the run is finished")


def give_back(s: AgentState) -> None:
    """Return the progress of an unsuccessful push to the next one; it is lost if its trainer is gone."""
    trainer = s.trainer
    if trainer.alive and s.sync.frozen_by == trainer.attempt and not trainer.must_pull:
        s.account.give_back()
    else:
        s.ranges.take_back_unserved(s.account.lose_frozen())


def abort_push(s: AgentState, reason: str, diverged: bool = False) -> None:
    s.sync.phase, s.sync.reason, s.sync.grant = SyncPhase.ABORTING, reason, None
    ask_master(s, Channel.SYNC, PushAborted(0, s.push_id, reason, diverged))


def _mark_outcome(s: AgentState, outcome: str, version: str, reason: str) -> None:
    if s.sync.phase is SyncPhase.AWAITING:
        s.record_mark("window_end", seq=s.sync.seq)
    s.sync.result = PushResult(s.membership.inc, s.sync.seq, str(outcome), reason)
    s.record_mark("outcome", outcome=outcome, version=version, seq=s.sync.seq, reason=reason)
