"""Heartbeats: they renew the cluster's lease, and their answers tell the cluster's standing.

Must stay true: an answer is accepted only for the incarnation that asked, and only from a master without a successor.
"""

from __future__ import annotations

from math import inf, nan

from dips.client.agent.actions import SaveIncarnation, SendHeartbeat
from dips.client.agent.membership import past_incarnation, rejoin_run
from dips.client.agent.phases import ACTIVITY, SyncPhase
from dips.client.agent.pulls import end_transfer
from dips.client.agent.pushes import give_back
from dips.client.agent.questions import end_pauses
from dips.client.agent.remarks import list_remarks
from dips.client.agent.state import AgentState, TrainerAttempt
from dips.client.agent.transfers import halt_dropped, moving_transfer, push_idle_s
from dips.errors import Denied, StaleIncarnation
from dips.protocol.enums import Activity, ClusterStanding, TrainerState
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer

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
        s.heartbeats.due_at, s.heartbeats.in_flight = inf, True
        s.out.append(SendHeartbeat(heartbeat, max(s.settings.heartbeat_s, LEAST_DEADLINE_S)))


def build_heartbeat(s: AgentState) -> ClusterHeartbeat | None:
    """Return the heartbeat for the present state; None before the first Join."""
    if s.membership.inc == 0:
        return None
    trainer, sync, account = s.trainer, s.sync, s.account
    stands = trainer.alive and not sync.verdict and not s.trains_on
    activity = ACTIVITY.get(sync.phase, Activity.INNER) if stands else Activity.INNER
    sync.moving_at_heartbeat = moving_transfer(s)
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
        *sync.moved,
        sync.bytes_per_s,
        s.pace.aligned_steps,
        s.pace.step_s or (0.0 if s.pace.aligned_steps else s.pace.first_step_s),
        s.pace.since_push,
        account.consumed_tokens,
        sync.seq if trainer.alive and sync.phase in OPEN_TRANSFER else 0,
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
    s.update_progress(answer.progress)
    s.pace.set_meeting(answer.push_in_s, s.now)
    if answer.standing is ClusterStanding.LIVE:
        halt_dropped(s, (answer.push, answer.pull))
    if answer.standing is ClusterStanding.FENCED:
        s.fail_training(StaleIncarnation(f"{s.cluster}/{inc} is fenced by a newer incarnation of the cluster"))
    elif answer.standing is ClusterStanding.GONE:
        rejoin_run(s)
    elif s.sync.phase is SyncPhase.UNSURE:
        give_back(s)
        end_transfer(s, "the master took up this incarnation again")
