"""A cluster's push and pull: rank 0's questions, and the steps from the request to the outcome."""

from __future__ import annotations

from dips.client.agent.state import AgentState, Channel, SyncPhase, ask_master
from dips.client.agent.training import (
    look_at_freeze,
    look_at_outcome,
    lose_work,
    mark_inner_steps,
    name_cause,
    refuse_uncounted,
)
from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    ErrorReply,
    Halt,
    Noted,
    Over,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushResult,
    PushWanted,
    TrainOn,
    TransferProgress,
)
from dips.dataclass import replace
from dips.errors import Diverged
from dips.ids import PullId, PushId
from dips.protocol.effects import Acknowledged, Committed, Dropped, Finished, Grant, Outcome, Refused
from dips.protocol.enums import DivergencePolicy, OutcomeKind
from dips.protocol.events import PullFinished, PullRequested, PushAborted, PushFinished, PushRequested, RoundAwaited

# ---- transfers ------------------------------------------------------------------------------------------------------


def begin_transfer(s: AgentState) -> None:
    """Reset the counters before the ranks move bytes."""
    s.sync.halt = ""
    s.sync.meter.begin_moving(s.now)


def record_moved(s: AgentState, nbytes: int, total: int, idle_s: float = 0.0) -> None:
    """Record the bytes moved over all ranks; `idle_s` is the time before this report in which none moved."""
    meter = s.sync.meter
    meter.record_bytes(nbytes, total, s.now, idle_s, staggered=s.settings.fragments > 1)
    if s.sync.phase is SyncPhase.PUSHING and nbytes:  # the first report is of none: the former push's rate holds
        meter.push_bytes_per_s = meter.bytes_per_s


def on_transfer_progress(s: AgentState, message: TransferProgress) -> Answer:
    """Record the progress; halt a transfer that the master has dropped or that belongs to another incarnation."""
    if s.sync.ordered != moving_transfer(s):
        return Halt(f"{s.sync.ordered} is over")
    record_moved(s, message.nbytes, message.total, message.idle_s)
    return Halt(s.sync.halt) if s.sync.halt else Noted()


def moving_transfer(s: AgentState) -> PushId | PullId | None:
    """Return the push or pull that the ranks are moving now, or None."""
    if s.sync.phase is SyncPhase.PUSHING:
        return s.push_id
    return s.pull_id if s.sync.phase is SyncPhase.PULLING else None


def halt_dropped(s: AgentState, live: tuple[PushId | None, PullId | None]) -> None:
    """Halt a transfer that was moving at the last heartbeat and that the master no longer lists."""
    moving = moving_transfer(s)
    if moving is not None and moving == s.sync.moving_at_heartbeat and moving not in live:
        s.sync.halt = f"the master has dropped {moving}"


def fragment_interval(s: AgentState) -> int:
    """Return the inner steps between two fragments; 0: all move at once, or the pace is not known yet.

    The fragments of a push take half of the time between two pushes, those of its pull the other half, so that there
    are as many rounds as without fragments.
    """
    fragments = s.settings.fragments
    return s.pace.round_steps // (2 * fragments) if fragments > 1 else 0


def push_idle_s(s: AgentState) -> float:
    """Return the least time for which a push is open without moving: overlapping ranks ask, freeze and ask again.

    Rather too short than too long: no window waits for a push that is due after the window's end.
    """
    if not s.settings.overlap:
        return 0.0
    look, interval = s.pace.steps_until_ask, fragment_interval(s)
    between = (s.settings.fragments - 1) * (interval - look)  # one question per fragment counts as moving
    return (look + max(look, between)) * s.pace.step_s


# ---- verdicts -------------------------------------------------------------------------------------------------------


def give_verdict(s: AgentState, verdict: Answer) -> None:
    """Set the answer to rank 0's question, which no longer waits; each repetition gets the same answer."""
    s.sync.verdict, s.sync.waiting = verdict, False


def conclude_question(s: AgentState, reason: str, again: bool = False) -> None:
    """Let the trainer train on, or end if the run is finished."""
    finished = s.membership.progress.finished
    if finished:
        give_verdict(s, Over(f"the run is finished with {finished}", s.fraction, s.sync.result))
    else:
        give_verdict(s, train_on(s, reason, again))


def train_on(s: AgentState, reason: str, again: bool = False) -> TrainOn:
    """Return the order to train on; with `again` ask at the next step, otherwise the transfer is over and the pace
    restarts.
    """
    if again:
        return put_off(s, reason, 1)
    if not s.settings.overlap:  # with overlap the pace restarted when the push was frozen
        s.pace.restart_count(s.now)
    return put_off(s, reason, max(1, s.pace.look_in(s.now)))


def put_off(s: AgentState, reason: str, steps: int) -> TrainOn:
    """Return the order to train on and ask again after `steps`; a push that the script still demands is given up."""
    return TrainOn(reason, steps, s.fraction, s.sync.result, s.range_requests.recalls, given_up=s.sync.demanded)


# ---- divergence -----------------------------------------------------------------------------------------------------
# Handling of a model that is no longer finite: `on_divergence` of the cluster file.
#
# The ranks detected it, and none of the model was pushed. With `reset` they pull the head, drop their optimizer's state
# and train on; otherwise they end with an error, and the next attempt pulls. A model that diverges repeatedly from the
# run's own parameters and an empty optimizer is no transient: the job ends instead of holding its accelerators.


MOST_RESETS = 5  # in a row, without a finite push between them; each costs a pull and H steps


def judge_divergence(s: AgentState, reason: str) -> None:
    """Record the divergence; answer the ranks' question with an error unless they reset the model themselves."""
    policy = s.settings.on_divergence
    s.trainer.resets += 1
    hopeless = s.trainer.resets > MOST_RESETS
    s.record_mark("diverged", push=str(s.push_id), reason=reason, policy=str(policy))
    if policy is DivergencePolicy.RESET and not hopeless:
        return
    error = Diverged(f"{reason} (on_divergence: {policy})")
    if hopeless:
        error = Diverged(
            f"{reason}; {s.trainer.resets} times in a row, each from the run's parameters and an empty optimizer: look "
            "at its data, learning rate and precision (NaN in the first steps?)"
        )
    if policy is DivergencePolicy.STOP or hopeless:
        s.fail_training(error)
    give_verdict(s, ErrorReply(type(error).__name__, str(error)))


# ---- pulls ----------------------------------------------------------------------------------------------------------
# The steps of a pull: asked for, granted, moved, closed. Between two transfers the cluster rests; a due pull comes
# first.


PULL_TRIES = 3  # failures in a row after which a pull is given up, unless the trainer cannot train without it
RETRY_S = 0.5  # pause before a failed pull is asked for again


def end_transfer(s: AgentState, reason: str, again: bool = False, delay_s: float = 0.0) -> None:
    """End the present transfer: ask for the pull that a waiting trainer needs, or again for the push that its script
    demands, or answer the trainer.
    """
    sync = s.sync
    sync.phase, sync.reason, sync.grant = SyncPhase.RESTING, reason, None
    want_final_pull(s)
    if sync.waiting and sync.pull_due:
        ask_pull(s, delay_s)
    elif _stands_on(s):
        ask_push(s, AGAIN_S, reason)
    elif sync.waiting:
        conclude_question(s, reason, again)


def want_final_pull(s: AgentState) -> None:
    """Schedule one pull of a finished run's last version."""
    finished = s.membership.progress.finished
    if finished and finished not in (s.trainer.base, s.sync.final_tried):
        s.sync.pull_due, s.sync.final_tried = True, finished


def want_pull(s: AgentState, _: PullWanted) -> None:
    """Schedule the pull that a trainer waits for: it begins without the run's parameters, or its script has put others
    in their place, as those of a checkpoint that is overtaken.
    """
    s.trainer.must_pull = s.sync.pull_due = True
    end_transfer(s, "a pull is wanted")


def ask_pull(s: AgentState, delay_s: float = 0.0) -> None:
    sync = s.sync
    sync.seq += 1
    sync.meter.reset_bytes()
    sync.phase, sync.reason = SyncPhase.ASKING_PULL, sync.reason or "it asks for a pull"
    ranks = s.trainer.pull_ranks
    ask_master(s, Channel.SYNC, PullRequested(0, s.pull_id, ranks, keys=s.trainer.keys[:ranks]), delay_s)


def on_pull_granted(s: AgentState, grant: Grant, after_push: bool = False) -> None:
    """Let the ranks move the pull if they still wait, else close it."""
    sync = s.sync
    if not sync.waiting:  # the trainer trains on, or has died
        close_pull(s, False)
        return
    sync.phase, sync.reason, sync.grant = SyncPhase.PULLING, f"pulls {grant.version}", grant
    finished = s.membership.progress.finished
    sync.merge = s.settings.overlap and after_push and not s.trainer.must_pull and not finished
    begin_transfer(s)
    s.record_mark("pull_begin", pull=str(s.pull_id), version=str(grant.version))


def on_pull_moved(s: AgentState, moved: PullMoved) -> None:
    """Process the end of a pull: all ranks have installed the version, or none has, or the model is torn (some layers
    only).
    """
    sync, trainer = s.sync, s.trainer
    assert sync.grant
    version = sync.grant.version
    s.record_mark(
        "pull_end", pull=str(s.pull_id), version=str(version), installed=moved.installed, nbytes=moved.nbytes,
        reason=moved.reason,
    )  # fmt: skip
    if moved.installed:
        _record_install(s, moved)
        trainer.base, trainer.must_pull, sync.pull_due, sync.pull_failures = version, False, False, 0
        overwrote = sync.demanded and not moved.merged
        sync.reason = f"{version} was pulled over what it had trained" if overwrote else f"trains on {version}"
    else:
        if moved.torn:
            trainer.base = None  # the trainer has no parameters of the run until a pull succeeds
            s.record_mark("torn", pull=str(s.pull_id))
        record_pull_failure(s, f"its pull failed: {moved.reason}")
    close_pull(s, moved.installed)
    want_final_pull(s)
    if moved.installed and sync.merge and not moved.merged:
        judge_divergence(s, "what it trained beside its pull was not finite")
    if sync.waiting and not sync.pull_due:  # the trainer need not wait while the pull is being closed
        conclude_question(s, sync.reason)


def _record_install(s: AgentState, moved: PullMoved) -> None:
    record_moved(s, moved.nbytes, moved.nbytes)
    s.tally.moved["pull"] += moved.nbytes
    if not moved.merged:
        lose_work(s)  # the pull has overwritten the work since the last freeze


def record_pull_failure(s: AgentState, reason: str) -> None:
    """Schedule another try; without limit only if the trainer cannot train with its present parameters."""
    sync = s.sync
    sync.pull_failures, sync.reason = sync.pull_failures + 1, reason
    sync.pull_due = s.trainer.must_pull or s.trainer.base is None or sync.pull_failures < PULL_TRIES
    if not sync.pull_due:
        sync.pull_failures = 0


def close_pull(s: AgentState, installed: bool) -> None:
    """Tell the master that the slaves need not keep the version for this cluster any longer."""
    s.sync.phase, s.sync.grant = SyncPhase.CLOSING, None
    ask_master(s, Channel.SYNC, PullFinished(0, s.pull_id, installed))


def on_pull_refused(s: AgentState, result: Refused) -> None:
    record_pull_failure(s, f"its pull was refused: {result.reason}")
    end_transfer(s, s.sync.reason, delay_s=result.retry_after_s)


def on_pull_dropped(s: AgentState, result: Dropped) -> None:
    record_pull_failure(s, f"its pull was dropped: {result.reason}")
    end_transfer(s, result.reason, delay_s=RETRY_S)


def on_pull_after_end(s: AgentState, result: Finished) -> None:
    """End the pull: the run is finished, and its last version cannot be pulled any more."""
    s.membership.progress = replace(s.membership.progress, finished=result.version)
    s.sync.pull_due, s.sync.final_tried = False, result.version
    end_transfer(s, "the run is finished")


def on_closed(s: AgentState, _: Acknowledged | Dropped) -> None:
    """Rest again after the master has closed the pull or the aborted push."""
    end_transfer(s, s.sync.reason, delay_s=RETRY_S)


# ---- pushes ---------------------------------------------------------------------------------------------------------
# Must stay true: progress is cut when the ranks freeze the model, and settled, given back or lost exactly once.


AGAIN_S = 1.0  # pause before a push that got no slot is asked for again: its slave is not back within a step


def ask_push(s: AgentState, delay_s: float = 0.0, reason: str = "it asks for a push") -> None:
    sync = s.sync
    assert s.trainer.base is not None
    if sync.stands:
        s.pace.pause_timing()
    sync.seq += 1
    sync.meter.reset_bytes()
    sync.phase, sync.reason = SyncPhase.ASKING_PUSH, reason
    tokens, step_s, ranks = s.account.carried.tokens, s.pace.step_s, s.trainer.push_ranks
    keys, idle_s = s.trainer.keys[:ranks], push_idle_s(s)
    event = PushRequested(0, s.push_id, s.trainer.base, ranks, tokens, step_s, keys, idle_s)
    ask_master(s, Channel.SYNC, event, delay_s)


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
    s.record_mark("push_begin", push=str(s.push_id), base=str(s.trainer.base), tokens=s.account.frozen.tokens)


def on_push_moved(s: AgentState, moved: PushMoved) -> None:
    """Ask the master to commit the push if all bytes are at the slaves; otherwise abort it, and the trainer trains
    on, or waits for another try if its script demands the push.
    """
    sync = s.sync
    s.record_mark("push_end", push=str(s.push_id), ok=moved.ok, nbytes=moved.nbytes, reason=moved.reason)
    if moved.diverged:
        _heal_diverged(s, moved)
        return
    if not moved.ok:
        give_back(s)
        abort_push(s, f"its push failed: {moved.reason}")
        if not is_demanded_still(s):
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
    s.account.give_back()
    lose_work(s)
    s.trainer.must_pull = s.sync.pull_due = True
    abort_push(s, f"its model diverged: {moved.reason}", diverged=True)
    judge_divergence(s, s.sync.reason)


def on_push_refused(s: AgentState, result: Refused) -> None:
    s.sync.backoff_until = s.now + result.retry_after_s
    if result.place and result.place != s.sync.place:
        s.record_mark("waits_for_slot", place=result.place, waiting=result.waiting, reason=result.reason)
    s.sync.place = result.place
    if _stands_on(s):
        ask_push(s, result.retry_after_s, result.reason)
        return
    if s.sync.waiting and s.sync.stands:  # else no step was interrupted
        s.pace.begin_step(s.now)
    end_transfer(s, result.reason, again=True)


def on_committed(s: AgentState, _: Committed) -> None:
    s.sync.phase, s.sync.reason = SyncPhase.AWAITING, "its push is committed, the window is open"
    s.record_mark("window_begin", push=str(s.push_id))
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
    sync.demanded = False
    settled = s.account.settle_outcome(result.kind)
    s.ranges.settle_part(settled.ranges, settled.begun)
    s.ranges.asks_again = True  # the run may have more epochs since, or ranges of undone versions
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
    if asking and _stands_on(s):
        ask_push(s, AGAIN_S, result.reason)
        return
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
        s.record_mark("window_end", push=str(s.push_id))
    s.sync.result = PushResult(s.membership.inc, s.sync.seq, str(outcome), reason)
    s.record_mark("outcome", push=str(s.push_id), outcome=outcome, version=version, reason=reason)


# ---- questions ------------------------------------------------------------------------------------------------------
# Questions of rank 0, which opens a push or pull with a question of a new number and repeats it until it has its
# verdict. A push or pull whose trainer died, or trains on because the master cannot be reached, continues to its end
# without the trainer, so that a committed push is settled.


STAND_S = 1.0  # a trainer waits this long for a slot: free slots are reserved in milliseconds
DEMANDED_S = 600.0  # and this long if its script demands the push: nothing may come after it that could push instead

SyncQuestion = PushWanted | PushMoved | PullWanted | PullMoved
_WANTED, _MOVED = (PushWanted, PullWanted), (PushMoved, PullMoved)


def answer_question(s: AgentState, q: SyncQuestion) -> Answer:
    """Return the verdict on rank 0's question; AskAgain until there is one."""
    sync = s.sync
    sync.stands = not q.at_once
    if q.number > sync.heard:
        sync.heard = q.number
        if isinstance(q, _WANTED):  # the report of a transfer that a demand has begun still waits for its end
            sync.heard_at, sync.demanded = s.now, isinstance(q, PushWanted) and q.demanded
    if q.number > sync.question:
        if isinstance(q, PushWanted) and _is_reserving(s):
            _take_question(s, q.number)  # asked again after training on for a while; its STAND_S are used up
        elif isinstance(q, _WANTED) and sync.phase is not SyncPhase.RESTING:
            # The last transfer is being settled; a trainer with parameters need not wait for an unreachable master.
            away = isinstance(q, PushWanted) and s.membership.unreachable_since is not None
            stands = not away or is_demanded_still(s)
            return AskAgain(sync.reason) if stands else train_on(s, sync.reason, again=True)
        else:
            _take_question(s, q.number)
            sync.waits_since = s.now
            _open_question(s, q)
    verdict = _find_verdict(s)
    if isinstance(verdict, AskAgain) and _waits_for_push(s) and _stands_too_long(s):
        sync.waiting = False  # the master is still asked: its grant is taken at the trainer's next question
        return put_off(s, sync.reason, s.pace.steps_until_ask)
    return verdict


def _take_question(s: AgentState, number: int) -> None:
    s.sync.question, s.sync.waiting, s.sync.verdict = number, True, None


def _is_reserving(s: AgentState) -> bool:
    """Return whether a push is asked for or granted, and the ranks do not have the order to freeze yet."""
    return s.sync.phase is SyncPhase.ASKING_PUSH or (s.sync.phase is SyncPhase.PUSHING and not s.sync.frozen)


def _waits_for_push(s: AgentState) -> bool:
    """Return whether a push is asked for, or one that the script demands will be once the last is aborted."""
    again = s.sync.phase is SyncPhase.ABORTING and s.sync.demanded and not s.trainer.must_pull
    return again or s.sync.phase is SyncPhase.ASKING_PUSH


def _stands_too_long(s: AgentState) -> bool:
    """Return whether the trainer has waited long enough for a slot: DEMANDED_S for a push that its script demands, else
    STAND_S, or not at all for an unreachable master.
    """
    if s.sync.demanded:
        return not is_demanded_still(s)
    in_vain = s.membership.unreachable_since is not None or s.now - s.sync.waits_since >= STAND_S
    return s.sync.stands and in_vain


def is_demanded_still(s: AgentState) -> bool:
    """Return whether the script demands a push that is not settled, and has waited less than DEMANDED_S for it."""
    return s.sync.demanded and s.now - s.sync.heard_at < DEMANDED_S


def _stands_on(s: AgentState) -> bool:
    """Return whether the trainer stands until its push is settled, though one was just refused or has failed."""
    comes_first = s.sync.pull_due or s.membership.progress.finished is not None
    return s.sync.waiting and is_demanded_still(s) and not comes_first


def _open_question(s: AgentState, q: SyncQuestion) -> None:
    """Start the transfer that a new question asks for, if it is still appropriate."""
    sync = s.sync
    # A seq alone may be that of a former incarnation's transfer, which the ranks were ordered before this one.
    ends_present = isinstance(q, _MOVED) and q.seq == sync.seq and sync.ordered == moving_transfer(s)
    if isinstance(q, PushMoved) and sync.phase is SyncPhase.PUSHING and ends_present:
        on_push_moved(s, q)
    elif isinstance(q, PullMoved) and sync.phase is SyncPhase.PULLING and ends_present:
        on_pull_moved(s, q)
    elif isinstance(q, PullWanted):
        want_pull(s, q)
    elif sync.phase is not SyncPhase.RESTING:
        pass  # the question is about a transfer that is over; the verdict on the present one will follow
    elif isinstance(q, _MOVED) or sync.pull_due or s.membership.progress.finished:
        end_transfer(s, "the transfer was ended meanwhile")
    elif s.now < sync.backoff_until and not q.demanded:
        give_verdict(s, train_on(s, sync.reason, again=True))
    elif (steps := s.pace.look_in(s.now)) and not q.demanded:
        give_verdict(s, TrainOn(sync.reason, steps, s.fraction, sync.result, s.range_requests.recalls))
    elif (refusal := refuse_uncounted(s)) is not None:
        give_verdict(s, refusal)
    elif (pause_s := sync.backoff_until - s.now) > 0:
        ask_push(s, pause_s, sync.reason)
    else:
        ask_push(s)


def _find_verdict(s: AgentState) -> Answer:
    """Return the present answer to the ranks; returning PushNow freezes the push."""
    sync, inc = s.sync, s.membership.inc
    if sync.verdict:
        return sync.verdict
    if sync.phase is SyncPhase.PUSHING and sync.grant:
        freeze_push(s)
        sync.ordered = s.push_id
        return PushNow(inc, sync.seq, sync.grant, sync.accepted_seq, fragment_interval(s))
    if sync.phase is SyncPhase.PULLING and sync.grant:
        interval = fragment_interval(s) if sync.merge else 0
        sync.ordered = s.pull_id
        sync.stands |= not sync.merge  # an inner step before the install would be lost
        return PullNow(inc, sync.seq, sync.grant, s.fraction, sync.accepted_seq, sync.merge, sync.result, interval)
    return AskAgain(sync.reason, s.pace.steps_until_ask)
