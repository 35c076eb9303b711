"""One push or pull between rank 0 on one side and the master on the other.

Rank 0 opens it with a question of a new number and repeats the question until it has its verdict. A table (REPLIES)
says which of the master's replies is legal in which phase, and which function handles it. A push or pull whose trainer
died, or trains on because the master cannot be reached, continues to its end without the trainer, so that a committed
push is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dips.client.agent import membership, push_pull
from dips.client.agent.push_pull import fragment_interval, give_verdict, train_on
from dips.client.agent.state import AgentState, Channel, SyncPhase, close_channel, repeat_question
from dips.client.agent.training import refuse_uncounted
from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushWanted,
    TrainOn,
)
from dips.errors import DipsError, LocalProtocolError, Stale, StaleIncarnation, StaleVersion
from dips.protocol.effects import (
    Acknowledged,
    Committed,
    Dropped,
    Finished,
    Grant,
    Joined,
    ManifestWanted,
    Outcome,
    Pending,
    Refused,
    Result,
)

STAND_S = 1.0  # a trainer waits this long for a slot: free slots are reserved in milliseconds

SyncQuestion = PushWanted | PushMoved | PullWanted | PullMoved
_WANTED, _MOVED = (PushWanted, PullWanted), (PushMoved, PullMoved)


def answer_question(s: AgentState, q: SyncQuestion) -> Answer:
    """Return the verdict on rank 0's question; AskAgain until there is one."""
    sync = s.sync
    if q.number > sync.question:
        if isinstance(q, PushWanted) and _is_reserving(s):
            _take_question(s, q.number)  # asked again after training on for a while; its time of waiting is used up
        elif isinstance(q, _WANTED) and sync.phase is not SyncPhase.RESTING:
            # The last transfer is being settled; a trainer with parameters need not wait for an unreachable master.
            away = isinstance(q, PushWanted) and s.membership.unreachable_since is not None
            return train_on(s, sync.reason, again=True) if away else AskAgain(sync.reason)
        else:
            _take_question(s, q.number)
            sync.waits_since = s.now
            _open_question(s, q)
    verdict = _find_verdict(s)
    if isinstance(verdict, AskAgain) and sync.phase is SyncPhase.ASKING_PUSH and _stands_too_long(s):
        sync.waiting = False  # the master is still asked: its grant is taken at the trainer's next question
        return TrainOn(sync.reason, s.pace.steps_until_ask, s.fraction, sync.result, s.range_requests.recalls)
    return verdict


def _take_question(s: AgentState, number: int) -> None:
    s.sync.question, s.sync.waiting, s.sync.verdict = number, True, None


def _is_reserving(s: AgentState) -> bool:
    """Return whether a push is asked for or granted, and the ranks do not have the order to freeze yet."""
    return s.sync.phase is SyncPhase.ASKING_PUSH or (s.sync.phase is SyncPhase.PUSHING and not s.sync.frozen)


def _stands_too_long(s: AgentState) -> bool:
    """Return whether the trainer has waited long enough for a slot: STAND_S, or not at all for an unreachable
    master.
    """
    in_vain = s.membership.unreachable_since is not None or s.now - s.sync.waits_since >= STAND_S
    return not s.settings.overlap and in_vain


def _open_question(s: AgentState, q: SyncQuestion) -> None:
    """Start the transfer that a new question asks for, if it is still appropriate."""
    sync = s.sync
    if isinstance(q, PushMoved) and sync.phase is SyncPhase.PUSHING and q.seq == sync.seq:
        push_pull.on_push_moved(s, q)
    elif isinstance(q, PullMoved) and sync.phase is SyncPhase.PULLING and q.seq == sync.seq:
        push_pull.on_pull_moved(s, q)
    elif isinstance(q, PullWanted):
        push_pull.want_pull(s, q)
    elif sync.phase is not SyncPhase.RESTING:
        pass  # the question is about a transfer that is over; the verdict on the present one will follow
    elif isinstance(q, _MOVED) or sync.pull_due or s.membership.progress.finished:
        push_pull.end_transfer(s, "the transfer was ended meanwhile")
    elif s.now < sync.backoff_until:
        give_verdict(s, train_on(s, sync.reason, again=True))
    elif (steps := s.pace.look_in(s.now)) and not q.demanded:
        give_verdict(s, TrainOn(sync.reason, steps, s.fraction, sync.result, s.range_requests.recalls))
    elif (refusal := refuse_uncounted(s)) is not None:
        give_verdict(s, refusal)
    else:
        push_pull.ask_push(s)


def _find_verdict(s: AgentState) -> Answer:
    """Return the present answer to the ranks; returning PushNow freezes the push."""
    sync, inc = s.sync, s.membership.inc
    if sync.verdict:
        return sync.verdict
    if sync.phase is SyncPhase.PUSHING and sync.grant:
        push_pull.freeze_push(s)
        sync.ordered = s.push_id
        return PushNow(inc, sync.seq, sync.grant, sync.accepted_seq, fragment_interval(s))
    if sync.phase is SyncPhase.PULLING and sync.grant:
        interval = fragment_interval(s) if sync.merge else 0
        sync.ordered = s.pull_id
        return PullNow(inc, sync.seq, sync.grant, s.fraction, sync.accepted_seq, sync.merge, sync.result, interval)
    return AskAgain(sync.reason, s.pace.steps_until_ask)


def on_sync_reply(s: AgentState, result: Result) -> None:
    """Process the master's reply to the open question."""
    if isinstance(result, Pending):
        s.sync.reason = result.reason
        s.membership.times_taken = 0  # the holder of the name is silent
        repeat_question(s, Channel.SYNC)
        return
    close_channel(s, Channel.SYNC)
    handle = REPLIES.get((s.sync.phase, type(result)))
    if handle is None:
        s.fail_training(LocalProtocolError(f"while {s.sync.phase} the master answered {result!r}"))
    else:
        handle(s, result)


def on_sync_error(s: AgentState, error: DipsError) -> None:
    """Process the refusal of the open question. The next heartbeat's answer tells why an incarnation is stale."""
    close_channel(s, Channel.SYNC)
    if isinstance(error, StaleIncarnation):
        s.sync.phase, s.sync.reason = SyncPhase.UNSURE, str(error)
        s.heartbeats.due_at = s.now
    elif isinstance(error, StaleVersion) and s.sync.phase is SyncPhase.ASKING_PUSH:
        push_pull.on_base_refused(s, str(error))
    elif isinstance(error, Stale) and s.sync.phase is not SyncPhase.JOINING:
        drop = push_pull.on_pull_dropped if s.sync.phase is SyncPhase.ASKING_PULL else push_pull.on_push_dropped
        drop(s, Dropped(str(error)))
    else:
        s.fail_training(error)


# Legal replies by phase, with their handlers. Pending is legal in every phase: the question is repeated.
REPLIES: Mapping[tuple[SyncPhase, type], Callable[[AgentState, Any], None]] = {
    (SyncPhase.JOINING, Joined): membership.on_joined,
    (SyncPhase.JOINING, ManifestWanted): membership.on_manifest_wanted,
    (SyncPhase.JOINING, Acknowledged): membership.on_same_model,
    (SyncPhase.JOINING, Refused): membership.on_name_taken,
    (SyncPhase.ASKING_PUSH, Grant): push_pull.on_push_granted,
    (SyncPhase.ASKING_PUSH, Refused): push_pull.on_push_refused,
    (SyncPhase.ASKING_PUSH, Dropped): push_pull.on_push_dropped,
    (SyncPhase.ASKING_PUSH, Finished): push_pull.on_push_after_end,
    (SyncPhase.FINISHING, Committed): push_pull.on_committed,
    (SyncPhase.FINISHING, Outcome): push_pull.on_outcome,
    (SyncPhase.FINISHING, Dropped): push_pull.on_push_dropped,
    (SyncPhase.FINISHING, Finished): push_pull.on_push_after_end,
    (SyncPhase.AWAITING, Outcome): push_pull.on_outcome,
    (SyncPhase.AWAITING, Dropped): push_pull.on_push_dropped,
    (SyncPhase.AWAITING, Finished): push_pull.on_push_after_end,
    (SyncPhase.ABORTING, Acknowledged): push_pull.on_closed,
    (SyncPhase.ASKING_PULL, Grant): push_pull.on_pull_granted,
    (SyncPhase.ASKING_PULL, Refused): push_pull.on_pull_refused,
    (SyncPhase.ASKING_PULL, Dropped): push_pull.on_pull_dropped,
    (SyncPhase.ASKING_PULL, Finished): push_pull.on_pull_after_end,
    (SyncPhase.CLOSING, Acknowledged): push_pull.on_closed,
    (SyncPhase.CLOSING, Dropped): push_pull.on_closed,
}
