"""Attempts of the training job: each attaches, and ends when its rank 0 does, no matter who starts the next.

Must stay true: exactly one attempt is the present one, and messages of older attempts change nothing; progress that an
attempt made and did not push is lost with it.
"""

from __future__ import annotations

from dips.client.agent.membership import join_run, offer_manifest
from dips.client.agent.phases import SyncPhase
from dips.client.agent.pulls import close_pull
from dips.client.agent.pushes import abort_push, give_back
from dips.client.agent.state import AgentState
from dips.client.agent.training import mark_inner_steps
from dips.client.ipc.messages import Answer, AskAgain, Attach, Attached, Detach, ErrorReply, ManifestSent, Noted
from dips.errors import DifferentModel, RemoteProtocolError
from dips.protocol.effects import ManifestWanted
from dips.wire.packed_manifest import unpack_manifest


def attach_trainer(s: AgentState, message: Attach) -> Answer:
    """Attach rank 0 of an attempt; a repetition is answered with AskAgain until the cluster has joined."""
    trainer = s.trainer
    if message.process != trainer.process:
        # torchrun counts restarts on each host by itself: only our own launches can be ordered by number.
        if message.process in trainer.former_processes or 0 < message.launch < trainer.launch:
            over = f"attempt {message.launch}.{message.restart} is over, a newer one has begun"
            return ErrorReply("StaleIncarnation", over)
        _begin_attempt(s, message)
    return _answer_attach(s)


def take_manifest(s: AgentState, message: ManifestSent) -> Answer:
    """Take the manifest that the master asked for from rank 0; a repetition waits for the master's answer."""
    if message.process != s.trainer.process:
        return ErrorReply("StaleIncarnation", "this attempt is over, a newer one has begun")
    if s.membership.wants_manifest and not s.failure:
        _send_manifest(s, message.packed)
    return _answer_attach(s)


def _send_manifest(s: AgentState, packed: bytes) -> None:
    if not packed:
        s.fail_training(DifferentModel(f"{s.sync.reason}, and too large to be compared here: see dips check"))
        return
    try:
        unpack_manifest(packed, s.membership.manifest_digest)
    except RemoteProtocolError as error:
        s.fail_training(error)
    else:
        offer_manifest(s, packed)


def _answer_attach(s: AgentState) -> Answer:
    if s.failure:
        return s.failure
    if s.membership.wants_manifest:
        return ManifestWanted(s.membership.manifest_digest)
    if not s.joined:
        return AskAgain(s.sync.reason)
    s.trainer.attached = True
    return Attached(s.trainer.attempt, s.fraction)


def _begin_attempt(s: AgentState, message: Attach) -> None:
    trainer, sync, requests = s.trainer, s.sync, s.range_requests
    if trainer.alive:
        end_attempt(s, "a new attempt began")
    trainer.former_processes.add(trainer.process)
    trainer.attempt, trainer.alive, trainer.process = trainer.attempt + 1, True, message.process
    trainer.launch = max(trainer.launch, message.launch)
    trainer.push_ranks, trainer.pull_ranks = message.push_ranks, message.pull_ranks
    trainer.keys = message.keys
    trainer.steps_before, trainer.idle_since = trainer.inner_steps, s.now
    trainer.base, trainer.must_pull, trainer.starved, trainer.detached = None, False, False, False
    trainer.attached = False
    sync.question, sync.waiting, sync.verdict = 0, False, None
    sync.pull_failures, sync.frozen = 0, False
    s.pace.restart_count(s.now)
    s.ranges.exhausted, s.ranges.held_back, requests.ended_at, requests.rest_again_at = False, 0, None, 0.0
    requests.by_step, requests.recalls = False, 0
    s.record_mark("trainer_attached", attempt=trainer.attempt, launch=message.launch, restart=message.restart)
    model, joined = (message.manifest_digest, message.frozen_digest), s.membership
    if sync.phase is SyncPhase.UNJOINED or model != (joined.manifest_digest, joined.frozen_digest):
        joined.manifest_digest, joined.frozen_digest = model
        join_run(s, "its model is not yet compared with the run's")


def detach_trainer(s: AgentState, _: Detach) -> Answer:
    """End the attempt because the trainer has closed its outer loop."""
    end_attempt(s, "it is done")
    s.trainer.detached = True
    return Noted()


def end_attempt(s: AgentState, reason: str) -> None:
    """End the present attempt: book its progress since the last freeze as lost, requeue its ranges, end its open
    transfer.
    """
    s.trainer.alive = s.sync.waiting = False
    s.sync.verdict = None
    mark_inner_steps(s)
    s.ranges.take_back(s.account.lose_carried())
    s.record_mark("trainer_gone", attempt=s.trainer.attempt, reason=reason, tokens_lost=s.account.lost)
    if s.sync.phase in (SyncPhase.ASKING_PUSH, SyncPhase.PUSHING):
        give_back(s)
        abort_push(s, reason)
    elif s.sync.phase in (SyncPhase.ASKING_PULL, SyncPhase.PULLING):
        close_pull(s, False)
