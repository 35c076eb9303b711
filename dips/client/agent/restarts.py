"""Attempts of the training job, and the decision whether another is started after one ended."""

from __future__ import annotations

import re

from dips.client.agent.launch import CANNOT_START
from dips.client.agent.membership import join_run, offer_manifest
from dips.client.agent.push_pull import abort_push, close_pull, give_back
from dips.client.agent.state import AgentState, Crash, SyncPhase, drop_remark, make_remark
from dips.client.agent.trainer import BY_SIGNAL, SILENT, describe_signal
from dips.client.agent.training import look_at_end, mark_inner_steps
from dips.client.ipc.messages import Answer, AskAgain, Attach, Attached, Detach, ErrorReply, ManifestSent, Noted
from dips.dataclass import dataclass, replace
from dips.errors import ConfigError, DifferentModel, RemoteProtocolError, class_named, treatment_of
from dips.protocol.effects import ManifestWanted
from dips.protocol.enums import RemarkSubject
from dips.wire.packed_manifest import unpack_manifest

# ---- attempts -------------------------------------------------------------------------------------------------------
# Must stay true: exactly one attempt is the present one, and messages of older attempts change nothing; progress that
# an attempt made and did not push is lost with it.


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
    s.settings = replace(
        s.settings, overlap=message.overlap, fragments=message.fragments, on_divergence=message.on_divergence
    )
    trainer.steps_before, trainer.idle_since = trainer.inner_steps, s.now
    trainer.base, trainer.must_pull, trainer.starved, trainer.detached = None, False, False, False
    trainer.attached, trainer.pipeline, trainer.restarts_for = False, None, ""
    drop_remark(s, RemarkSubject.INSIDE)
    sync.question, sync.waiting, sync.verdict, sync.stands = 0, False, None, True
    sync.heard, sync.demanded = 0, False
    sync.pull_failures, sync.frozen = 0, False
    s.pace.restart_count(s.now)
    s.ranges.exhausted, s.ranges.held_back, requests.ended_at, requests.rest_again_at = False, 0, None, 0.0
    requests.by_step, requests.recalls, requests.claimed = False, 0, ()
    s.record_mark("trainer_attached", attempt=trainer.attempt, launch=message.launch, restart=message.restart)
    model, joined = (message.manifest_digest, message.frozen_digest), s.membership
    if model != (joined.manifest_digest, joined.frozen_digest):  # as for the first attempt
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


# ---- restarts -------------------------------------------------------------------------------------------------------
# A crash is worth another try unless another try must end the same way: the command does not exist, the configuration
# is wrong, or it has crashed in the same way three times before its first inner step. Where `before_start` writes the
# configuration, as a plan for the devices that are there, the next try may have a right one. Ranks that have said that
# they end for a new plan have not crashed: these ends are not counted.


RESTART_PAUSE_S = 1.0  # pause between a crash and the next launch
SAME_CRASHES = 3  # equal crashes before the first inner step after which no launch follows
EXIT_CONFIG = treatment_of(ConfigError()).exit_code
_NUMBER = re.compile(r"\d+")  # process ids, ports and addresses differ between equal crashes


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """Start the training command for the `launch`-th time, after `delay_s`."""

    launch: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class EndAgent:
    """End the agent with exit code `code`; `reason` is empty if the training command ended by itself."""

    code: int
    reason: str = ""


def plan_first_launch(s: AgentState) -> LaunchCommand:
    return LaunchCommand(1, 0.0)


def plan_next_launch(
    s: AgentState, before: LaunchCommand, code: int, terminated: bool, last_line: str = ""
) -> LaunchCommand | EndAgent:
    """Decide whether to start the command again after it ended with exit code `code` and `last_line` on standard
    error.
    """
    if s.stop is not None:
        return _end_agent(s, s.stop.code, s.stop.reason)
    ends = terminated or s.membership.progress.finished
    if s.trainer.restarts_for and not ends:
        s.trainer.restarts_for = ""
        return LaunchCommand(before.launch + 1, 0.0)
    if code == 0 or ends:
        if code == 0 and not terminated:
            look_at_end(s)
        return EndAgent(code)
    crash = Crash(s.now, code, last_line, s.trainer.inner_steps > 0)
    s.crashes.append(crash)
    while s.crashes[0].at < s.now - s.settings.restart_window_s:
        s.crashes.popleft()
    if reason := _why_hopeless(s, crash):
        return _end_agent(s, EXIT_CONFIG if _is_configuration(crash) else code, reason)
    crashed = f"crashing, {len(s.crashes)} of {s.settings.max_restarts}, {describe_crash(crash)}"
    make_remark(s, RemarkSubject.CRASH, crashed)
    return LaunchCommand(before.launch + 1, RESTART_PAUSE_S)


def describe_crash(crash: Crash) -> str:
    by = crash.code - 128 if crash.code in BY_SIGNAL else 0
    killed = f", {describe_signal(by)}" if by else ""
    said = f", last line: {crash.last_line}" if crash.last_line and by not in SILENT else ""
    return f"exit {crash.code}{killed}{said}"


def _end_agent(s: AgentState, code: int, reason: str) -> EndAgent:
    s.leaves_for = reason
    return EndAgent(code, reason)


def _why_hopeless(s: AgentState, crash: Crash) -> str:
    """Return why another try cannot help, or would exceed the limit; empty if it may help."""
    how = describe_crash(crash)
    if crash.code == CANNOT_START:
        return f"the training command cannot be started: {how}"
    if _is_configuration(crash) and not s.settings.before_start:
        return f"an error of configuration: {how}"
    if _is_same_crash(s):
        return f"crashed {SAME_CRASHES} times in the same way before its first step: {how}"
    if len(s.crashes) > s.settings.max_restarts:
        limit = f"max_restarts is {s.settings.max_restarts} in {s.settings.restart_window_s:.0f} s"
        return f"crashed too often: {len(s.crashes)} times, {limit}: {how}"
    return ""


def _is_configuration(crash: Crash) -> bool:
    """Return whether the crash was a configuration error, by its exit code or, behind torchrun, by its last line."""
    named = class_named(crash.last_line.partition(":")[0].rpartition(".")[2])
    raised = "dips.errors." in crash.last_line and named is not None and issubclass(named, ConfigError)
    return crash.code == EXIT_CONFIG or raised


def _is_same_crash(s: AgentState) -> bool:
    newest = list(s.crashes)[-SAME_CRASHES:]
    kinds = {(crash.code, _NUMBER.sub("#", crash.last_line)) for crash in newest}
    # A process that was killed, perhaps from outside, tells nothing about the next try.
    untried = not any(crash.stepped or crash.code in BY_SIGNAL for crash in newest)
    return len(newest) == SAME_CRASHES and len(kinds) == 1 and untried
