"""The cluster's incarnation at the master: joined with a nonce, kept by heartbeats, ended when its lease runs out."""

from __future__ import annotations

from math import inf, nan

from dips.client.agent.account import NO_INCARNATION, Account, PastIncarnation, RangeQueue
from dips.client.agent.push_pull import (
    end_transfer,
    give_back,
    give_verdict,
    halt_dropped,
    is_demanded_still,
    moving_transfer,
    push_idle_s,
    train_on,
)
from dips.client.agent.state import (
    ACTIVITY,
    AgentState,
    Channel,
    SaveIncarnation,
    SendHeartbeat,
    SyncPhase,
    TrainerAttempt,
    ask_master,
    close_channel,
    end_pauses,
    list_remarks,
)
from dips.client.agent.training import count_recall
from dips.errors import Denied, DifferentModel, StaleIncarnation
from dips.protocol.effects import Acknowledged, Joined, ManifestWanted, Refused
from dips.protocol.enums import Activity, ClusterStanding, TrainerState
from dips.protocol.events import ClusterJoined, ClusterLeft, ManifestOffered
from dips.protocol.heartbeats import REMARK_CHARS, ClusterHeartbeat, ClusterHeartbeatAnswer

# ---- membership -----------------------------------------------------------------------------------------------------
# Must stay true: messages of an older term or incarnation change nothing; work of a former incarnation is settled or
# lost there, and a trainer that continues from it pulls before any of its further work counts.


TAKEN_TRIES = 5  # Joins in a row, one per heartbeat of the master: a dead holder of the name is silent by then
LEAST_RETRY_S = 0.1


def join_run(s: AgentState, reason: str) -> None:
    """Begin a new incarnation; the former one, if there is one, ends by this."""
    member = s.membership
    if s.joined:
        member.former, s.account = PastIncarnation(member.inc, s.account.consumed_tokens), Account()
    member.nonce, member.wants_manifest = s.new_nonce(), False
    s.sync.phase, s.sync.reason, s.sync.grant = SyncPhase.JOINING, reason, None
    _ask_to_join(s)


def _ask_to_join(s: AgentState, delay_s: float = 0.0) -> None:
    """Ask the master to join with the present nonce: a repetition gets the same incarnation."""
    member, who, last = s.membership, s.settings.identity, max(s.membership.inc, s.membership.former.inc)
    event = ClusterJoined(
        0, who.cluster, member.nonce, who.run, member.manifest_digest, who.config_digest,
        former=last, take_over=s.settings.take_over and member.inc == 0, frozen_digest=member.frozen_digest,
    )  # fmt: skip
    ask_master(s, Channel.SYNC, event, delay_s)


def on_manifest_wanted(s: AgentState, result: ManifestWanted) -> None:
    """Ask rank 0 for the manifest, since the model differs from the run's; the master then tells where."""
    digests = f"this model is not the run's: its manifest's digest is {s.membership.manifest_digest[:12]}, the run's"
    s.sync.reason = f"{digests} is {result.digest[:12]}"
    s.membership.wants_manifest = True
    if s.trainer.alive and s.trainer.attached:  # this manifest was the run's: `dips init` has made another run since
        s.fail_training(DifferentModel(f"{s.sync.reason}, and was another when this trainer attached"))


def offer_manifest(s: AgentState, packed: bytes) -> None:
    """Send the manifest, so that the master can tell where this model differs from the run's."""
    s.membership.wants_manifest, s.sync.reason = False, "the master compares its model with the run's"
    ask_master(s, Channel.SYNC, ManifestOffered(s.cluster, s.membership.manifest_digest, packed))


def on_same_model(s: AgentState, _: Acknowledged) -> None:
    """Join again: a master that was started meanwhile serves a run of this same model."""
    join_run(s, "its model is the run's after all")


def on_joined(s: AgentState, result: Joined) -> None:
    """Begin the new incarnation that the master has assigned: its account, ranges and seq start anew."""
    member, sync = s.membership, s.sync
    if result.term < member.term:
        join_run(s, "a master answered that has a successor")
        return
    s.account.lose_carried()
    s.account = Account(lost=s.account.lost + _take_unreported(s, result))
    s.ranges = RangeQueue()
    s.ranges.add_leased(result.ranges, False, result.begun)
    count_recall(s)
    s.range_requests.seq, s.range_requests.claimed = 0, ()
    close_channel(s, Channel.RANGES)
    member.times_taken = 0
    member.term, member.inc, member.settled = result.term, result.inc, result.settled
    sync.seq = sync.accepted_seq = 0
    sync.pull_due = True
    s.trainer.must_pull = s.trainer.base is not None  # work under its former incarnation is overwritten
    s.update_progress(result.progress)
    s.record_mark("joined", inc=result.inc, head=str(result.head))
    end_transfer(s, f"joined as {s.cluster}/{member.inc}")


def on_name_taken(s: AgentState, result: Refused) -> None:
    """Retry a Join that was refused because an agent of this name is alive, or seems so to a master that has just
    started.
    """
    s.membership.times_taken += 1
    if s.membership.times_taken > TAKEN_TRIES:
        s.fail_training(Denied(f"{result.reason}: take another name, end that agent, or say --take-over to replace it"))
        return
    s.sync.reason = result.reason
    _ask_to_join(s, delay_s=max(result.retry_after_s, LEAST_RETRY_S))


def _take_unreported(s: AgentState, result: Joined) -> int:
    """Return the tokens of the former incarnation that the master has not accounted for: they are reported as lost now.

    The master never got those heartbeats, or got them and died without recording them. A push whose Outcome never
    arrived counts as lost here, although it may have been accepted.

    The master reports the incarnation right before this one. If that was not ours (two agents, a lost answer to Join),
    the tokens it has of ours are unknown: tokens that were never reported stay unreported, none is reported twice.
    """
    former, s.membership.former = s.membership.former, NO_INCARNATION
    ours = result.inc == former.inc + 1
    return max(0, former.consumed - result.accounted) if ours else 0


def rejoin_run(s: AgentState) -> None:
    """Join again after the lease ran out; unsettled work is lost, since the master has freed its ranges."""
    tokens_lost = s.account.lost + s.account.unsettled_tokens
    s.record_mark("incarnation_ended", inc=s.membership.inc, tokens_lost=tokens_lost)
    join_run(s, "its lease at the master ran out: it joins again")


def leave_run(s: AgentState) -> ClusterLeft | None:
    """Return the last message to the master; None if the cluster has no incarnation there."""
    if not s.joined:
        return None
    return ClusterLeft(0, s.cluster, s.membership.inc, s.account.consumed_tokens, s.leaves_for[:REMARK_CHARS])


def past_incarnation(s: AgentState) -> PastIncarnation:
    """Return what the next agent must know if this one dies now."""
    if s.joined:
        return PastIncarnation(s.membership.inc, s.account.consumed_tokens)
    former = s.membership.former
    return PastIncarnation(former.inc, former.consumed + s.account.consumed_tokens)


def on_unreachable(s: AgentState, reason: str) -> None:
    """Note that the master does not answer: after `patience_s` a waiting trainer trains on while the question is
    repeated.

    A trainer that waits for a slot trains on without this patience (push_pull.py).
    """
    member, sync = s.membership, s.sync
    if member.unreachable_since is None:
        member.unreachable_since = s.now
    if sync.verdict is None or sync.heard > sync.question:
        sync.reason = reason
    out_of_patience = s.now - member.unreachable_since >= s.settings.patience_s
    if out_of_patience and _waits_in_vain(s):
        sync.pull_due = False
        give_verdict(s, train_on(s, reason))


def _waits_in_vain(s: AgentState) -> bool:
    """Return whether the trainer waits although it could train, and only the master can end the wait. A push that its
    script demands is waited for longer.
    """
    could_train = s.sync.stands and s.trainer.base is not None and not s.trainer.must_pull
    masters_turn = s.sync.phase in (SyncPhase.FINISHING, SyncPhase.AWAITING, SyncPhase.ASKING_PULL)
    return s.sync.waiting and could_train and masters_turn and not is_demanded_still(s)


# ---- heartbeats -----------------------------------------------------------------------------------------------------
# Must stay true: an answer is accepted only for the incarnation that asked, and only from a master without a successor.


OPEN_TRANSFER = frozenset(  # phases in which the push or pull of the present seq is kept open for its ranks
    {
        SyncPhase.ASKING_PUSH,
        SyncPhase.PUSHING,
        SyncPhase.FINISHING,
        SyncPhase.AWAITING,
        SyncPhase.ASKING_PULL,
        SyncPhase.PULLING,
    }
)
LEAST_DEADLINE_S = 1.0  # shortest deadline of a heartbeat
# A refusal may be temporary: a certificate or authority is being replaced, the run file is corrected. Processes check
# their files once a second (transport/tls.py): a refusal that lasts two seconds, and one heartbeat, is final.
HEAL_S = 2.0


def send_due(s: AgentState) -> None:
    """Send the heartbeat that is due; before the first Join there is none."""
    s.heartbeats.due_at = s.now + s.settings.heartbeat_s
    s.out.append(SaveIncarnation(past_incarnation(s)))
    heartbeat = build_heartbeat(s)
    if heartbeat is not None:
        s.heartbeats.due_at, s.heartbeats.in_flight, s.heartbeats.overtaken = inf, True, False
        s.out.append(SendHeartbeat(heartbeat, max(s.settings.heartbeat_s, LEAST_DEADLINE_S)))


def build_heartbeat(s: AgentState) -> ClusterHeartbeat | None:
    """Return the heartbeat for the present state; None before the first Join."""
    if s.membership.inc == 0:
        return None
    trainer, sync, account = s.trainer, s.sync, s.account
    stands = sync.stands and not sync.verdict
    activity = ACTIVITY.get(sync.phase, Activity.INNER) if stands else Activity.INNER
    sync.moving_at_heartbeat, s.heartbeats.told_steps = moving_transfer(s), s.pace.since_push
    # between a refusal and the next request there is no transfer that the ranks should begin: they do not hang
    question = s.questions.get(Channel.SYNC)
    has_transfer = sync.phase in OPEN_TRANSFER and (question is None or question.asked_at <= s.now)
    return ClusterHeartbeat(
        s.cluster,
        s.membership.inc,
        _name_state(trainer),
        activity if trainer.alive else Activity.IDLE,
        trainer.attempt,
        trainer.inner_steps,
        account.unsettled_tokens,
        account.lost,
        nan if trainer.loss is None else trainer.loss,
        trainer.base,
        sync.meter.nbytes,
        sync.meter.total,
        sync.meter.push_bytes_per_s or sync.meter.bytes_per_s,
        s.pace.aligned_steps,
        s.pace.step_s or (0.0 if s.pace.aligned_steps else s.pace.first_step_s),
        s.pace.since_push,
        account.consumed_tokens,
        sync.seq if trainer.alive and has_transfer else 0,
        list_remarks(s),
        idle_s=push_idle_s(s),
    )


def _name_state(trainer: TrainerAttempt) -> TrainerState:
    if not trainer.alive:
        return TrainerState.DEAD
    return TrainerState.STARTING if trainer.base is None else TrainerState.TRAINING


def end_flight(s: AgentState) -> None:
    """Allow the next heartbeat after one was answered or failed; it is sent at once if it was requested meanwhile."""
    s.heartbeats.in_flight = False
    s.heartbeats.due_at = min(s.heartbeats.due_at, s.now + s.settings.heartbeat_s)


def on_refused(s: AgentState, error: Denied) -> None:
    """Process a refused heartbeat: training ends if heartbeats are refused for HEAL_S and a heartbeat, with no answer
    between.
    """
    timer = s.heartbeats
    if timer.refused_since is None:
        timer.refused_since = s.now
    elif s.now - timer.refused_since >= max(HEAL_S, s.settings.heartbeat_s):
        remedy = "have it enrolled (dips certs issue; `clusters` in the run file), then start this agent again"
        s.fail_training(Denied(f"cluster {s.cluster!r} may take part no more: {error}; {remedy}"))


def on_question_refused(s: AgentState, error: Denied) -> None:
    """Process a refused question: heartbeats, the first one at once, show whether the refusal is final."""
    s.sync.reason = str(error)
    if s.heartbeats.refused_since is None:
        s.heartbeats.due_at = s.now


def on_answer(s: AgentState, inc: int, answer: ClusterHeartbeatAnswer) -> None:
    """Process the answer to a heartbeat of incarnation `inc`."""
    member = s.membership
    s.heartbeats.refused_since = None
    end_pauses(s)
    if inc != member.inc or answer.term < member.term or s.sync.phase is SyncPhase.JOINING:
        return
    member.term, member.unreachable_since = answer.term, None
    s.update_progress(answer.progress, newest=not s.heartbeats.overtaken)
    if s.pace.since_push >= s.heartbeats.told_steps:  # else its push has ended since, and the answer is about that one
        s.pace.set_meeting(answer.push_in_s, s.now, answer.lease_s)
    if answer.standing is ClusterStanding.LIVE:
        halt_dropped(s, (answer.push, answer.pull))
    if answer.standing is ClusterStanding.FENCED:
        s.fail_training(StaleIncarnation(f"{s.cluster}/{inc} is fenced by a newer incarnation of the cluster"))
    elif answer.standing is ClusterStanding.GONE:
        rejoin_run(s)
    elif s.sync.phase is SyncPhase.UNSURE:
        give_back(s)
        end_transfer(s, "the master took up this incarnation again")
