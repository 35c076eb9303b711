"""Decides whether the training command is started again after it ended.

A crash is worth another try unless another try must end the same way: the command does not exist, the configuration is
wrong, or it has crashed in the same way three times before its first inner step.
"""

from __future__ import annotations

import re

from dips.client.agent.error_tail import BY_SIGNAL, SILENT, describe_signal
from dips.client.agent.in_vain import look_at_end
from dips.client.agent.launch import CANNOT_START
from dips.client.agent.remarks import make_remark
from dips.client.agent.state import AgentState, Crash
from dips.dataclass import dataclass
from dips.errors import ConfigError, class_named, treatment_of
from dips.protocol.enums import RemarkSubject

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
    if code == 0 or terminated or s.membership.progress.finished:
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
    by = crash.code - BY_SIGNAL
    killed = f", {describe_signal(by)}" if by > 0 else ""
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
    if _is_configuration(crash):
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
    untried = not any(crash.stepped or crash.code > BY_SIGNAL for crash in newest)
    return len(newest) == SAME_CRASHES and len(kinds) == 1 and untried
