"""All decisions of an agent, without clock, socket, file, task or process.

A shell passes on what happened and at what time, and performs the returned actions (state.py) in their order. Two
shells drive the core: the daemon (agent.py) and the simulation (dips/sim). The state is in state.py, the decisions are
in modules by subject; this file combines them.

Must stay true: messages of an older attempt, incarnation, question or term change nothing; a trainer without the run's
parameters, or whose incarnation ended, pulls before any of its further work counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from dips.client.agent import membership, push_pull, ranges, restarts, state, training
from dips.client.agent.account import NO_INCARNATION, Pace, PastIncarnation
from dips.client.agent.restarts import EndAgent, LaunchCommand
from dips.client.agent.state import (
    SAVED_AT,
    Actions,
    AgentSettings,
    AgentState,
    AskMaster,
    Channel,
    Membership,
    RecordMark,
    SaveIncarnation,
    StopTrainer,
    SyncPhase,
    close_channel,
    is_open,
    repeat_after_pause,
    repeat_question,
)
from dips.client.ipc import messages
from dips.errors import Busy, Denied, DipsError, LocalProtocolError, Stale, StaleIncarnation, StaleVersion, Unavailable
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
    Ranges,
    Refused,
    Result,
)
from dips.protocol.events import ClusterLeft
from dips.protocol.heartbeats import ClusterHeartbeatAnswer

EXIT_BUG = 70  # EX_SOFTWARE

# Handlers of messages from a trainer that has no attempt number yet.
ATTACHING: Mapping[type, Callable[[AgentState, Any], messages.Answer]] = {
    messages.Attach: restarts.attach_trainer,
    messages.ManifestSent: restarts.take_manifest,
}

# Handlers of messages from the present attempt; notices are answered by None.
MESSAGES: Mapping[type, Callable[[AgentState, Any], messages.Answer | None]] = {
    messages.Stepped: training.record_step,
    messages.TokensCounted: training.record_tokens,
    messages.LossReported: training.record_losses,
    messages.Remarked: training.take_remark,
    messages.PipelineReported: training.take_pipeline,
    messages.InsideChanged: training.take_change,
    messages.TransferProgress: push_pull.on_transfer_progress,
    messages.PushWanted: push_pull.answer_question,
    messages.PushMoved: push_pull.answer_question,
    messages.PullWanted: push_pull.answer_question,
    messages.PullMoved: push_pull.answer_question,
    messages.RangeWanted: ranges.give_range,
    messages.SaveWanted: ranges.save_progress,
    messages.Resume: ranges.resume_checkpoint,
    messages.Detach: restarts.detach_trainer,
}

# Handlers of replies about data ranges; handlers for pushes and pulls depend on the phase: REPLIES.
RANGE_REPLIES: Mapping[type, Callable[[AgentState, Any], None]] = {
    Ranges: ranges.on_leased,
    Finished: ranges.on_no_more_ranges,
    Refused: ranges.on_ranges_refused,
    Pending: ranges.on_ranges_pending,
}


def _on_sync_reply(s: AgentState, result: Result) -> None:
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


def _on_sync_error(s: AgentState, error: DipsError) -> None:
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


class AgentCore:
    """The decisions of one agent. `now` is monotonic seconds; the shell calls `tick` at `next_deadline` at the
    latest.
    """

    def __init__(
        self,
        settings: AgentSettings,
        pace: Pace,
        new_nonce: Callable[[], str],
        rng: Random,
        former: PastIncarnation = NO_INCARNATION,
    ) -> None:
        """Create the core of one agent.

        new_nonce  returns a unique name for each Join
        rng        for jitter
        former     the last incarnation that an agent which died here has saved
        """
        self.state = AgentState(settings, pace, new_nonce, rng, Membership(former=former))

    # ---- the training job ------------------------------------------------------------------------------------------

    def on_message(self, message: messages.Message, now: float) -> tuple[messages.Answer | None, Actions]:
        """Answer rank 0; None for notices, AskAgain if rank 0 must repeat the question later."""
        self.state.now = now
        attach = ATTACHING.get(type(message))
        answer = attach(self.state, message) if attach else self._answer_message(message)
        return answer, self._take_actions()

    def on_trainer_gone(self, reason: str, now: float) -> Actions:
        """End the present attempt, since the training command has ended."""
        self.state.now = now
        if self.state.trainer.alive:
            restarts.end_attempt(self.state, reason)
        return self._take_actions()

    def on_hang_up(self, attempt: int, now: float) -> Actions:
        """End an attempt whose rank 0 has disconnected; ignored if a newer attempt is present."""
        return self.on_trainer_gone("rank 0 is gone", now) if attempt == self.state.trainer.attempt else []

    def plan_first_launch(self) -> LaunchCommand:
        """Return the first launch of the training command."""
        return restarts.plan_first_launch(self.state)

    def plan_next_launch(
        self, before: LaunchCommand, code: int, terminated: bool = False, last_line: str = ""
    ) -> LaunchCommand | EndAgent:
        """Decide how to continue after a launch has ended.

        terminated  SIGTERM has arrived
        last_line   the last line on the command's standard error
        """
        return restarts.plan_next_launch(self.state, before, code, terminated, last_line)

    # ---- the master ------------------------------------------------------------------------------------------------

    def on_reply(self, ask: AskMaster, result: Result, now: float) -> Actions:
        """Process the master's reply; replies to closed questions are ignored."""
        s = self.state
        s.now, s.membership.unreachable_since = now, None
        if is_open(s, ask):
            if ask.channel is Channel.SYNC:
                _on_sync_reply(s, result)
            else:
                self._take_range_reply(result)
        return self._take_actions()

    def on_error(self, ask: AskMaster, error: DipsError, now: float) -> Actions:
        """Process the failure of a question: the master could not be reached, or refused it."""
        s = self.state
        s.now = now
        if isinstance(error, Unavailable | Busy):
            membership.on_unreachable(s, str(error))
            if is_open(s, ask):
                repeat_after_pause(s, ask.channel)
        elif isinstance(error, Denied) and s.membership.inc:  # a cluster that never joined fails at once
            membership.on_question_refused(s, error)
            if is_open(s, ask):
                repeat_after_pause(s, ask.channel)
        elif is_open(s, ask):
            self._on_refusal(ask.channel, error)
        return self._take_actions()

    def awaits_answer(self, ask: AskMaster) -> bool:
        """Return whether the core still waits for the answer to `ask`."""
        return is_open(self.state, ask)

    def on_heartbeat_reply(self, inc: int, answer: ClusterHeartbeatAnswer, now: float) -> Actions:
        """Process the answer to a heartbeat of incarnation `inc`."""
        self.state.now = now
        membership.end_flight(self.state)
        membership.on_answer(self.state, inc, answer)
        return self._take_actions()

    def on_heartbeat_error(self, error: DipsError, now: float) -> Actions:
        """Process a heartbeat that was refused or not answered; shows a dead link first, since questions have longer
        deadlines.
        """
        self.state.now = now
        membership.end_flight(self.state)
        if isinstance(error, Unavailable | Busy):
            membership.on_unreachable(self.state, str(error))
        elif isinstance(error, Denied):
            membership.on_refused(self.state, error)
        return self._take_actions()

    def leave_run(self) -> ClusterLeft | None:
        """Return the last message to the master; None if the cluster has no incarnation there."""
        return membership.leave_run(self.state)

    # ---- time and the shell itself ---------------------------------------------------------------------------------

    def tick(self, now: float) -> Actions:
        """Do all work that is due at `now`."""
        self.state.now = now
        state.tell_wait(self.state)
        training.look_for_steps(self.state)
        return self._take_actions()

    def on_certificate(self, problem: str) -> Actions:
        """Update the remark on certificates: `problem` says why the newest files are not used, "" if they are."""
        state.tell_certificate(self.state, problem)
        return self._take_actions()

    def next_deadline(self) -> float:
        """Return the time of the next `tick`; infinite while a heartbeat is in flight."""
        return self.state.heartbeats.next_deadline()

    def on_bug(self, error: BaseException) -> Actions:
        """Stop because a part of the shell has failed, which is a bug of this program."""
        self.state.end_training(StopTrainer(EXIT_BUG, f"{type(error).__name__}: {error}"))
        return self._take_actions()

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _answer_message(self, message: messages.Message) -> messages.Answer | None:
        s = self.state
        attempt = getattr(message, "attempt", None)
        if attempt != s.trainer.attempt or not s.trainer.alive:
            over = f"attempt {attempt} is over, the newest is {s.trainer.attempt}"
            return None if isinstance(message, messages.Notice) else messages.ErrorReply("StaleIncarnation", over)
        if s.failure:
            return s.failure
        handle = MESSAGES.get(type(message))
        if handle is None:
            return messages.ErrorReply("RemoteProtocolError", f"{type(message).__name__} is not a message of rank 0")
        return handle(s, message)

    def _on_refusal(self, channel: Channel, error: DipsError) -> None:
        s = self.state
        if channel is Channel.SYNC:
            _on_sync_error(s, error)
            return
        close_channel(s, channel)
        if isinstance(error, StaleIncarnation):
            s.heartbeats.due_at = s.now  # the heartbeat's answer shows whether this incarnation is gone or fenced
        else:
            s.fail_training(error)

    def _take_range_reply(self, result: Result) -> None:
        handle = RANGE_REPLIES.get(type(result))
        if handle is None:
            self.state.fail_training(LocalProtocolError(f"asked for data ranges, the master answered {result!r}"))
        else:
            handle(self.state, result)

    def _take_actions(self) -> Actions:
        s = self.state
        if s.heartbeats.is_due(s.now):
            membership.send_due(s)
        s.tally.switch_cause(training.name_cause(s), s.now)
        actions = s.out
        if not actions:
            return []
        s.out = []
        for action in actions:
            if isinstance(action, RecordMark) and action.kind in SAVED_AT:
                actions.insert(0, SaveIncarnation(membership.past_incarnation(s)))
                break
        return actions
