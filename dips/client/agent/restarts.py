"""Whether the training command is started again when it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from dips.client.agent.state import AgentState

RESTART_PAUSE_S = 1.0  # a trainer that crashes at once does not spin


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """Start the training command for the `launch`-th time, after `delay_s`."""

    launch: int
    delay_s: float
    launches_left: int  # after this one


@dataclass(frozen=True, slots=True)
class EndAgent:
    """The agent is done; `reason` is empty if the training command ended by itself."""

    code: int
    reason: str = ""


def plan_first_launch(s: AgentState) -> LaunchCommand:
    return LaunchCommand(1, 0.0, s.settings.max_restarts)


def plan_next_launch(s: AgentState, before: LaunchCommand, code: int, terminated: bool) -> LaunchCommand | EndAgent:
    """The command has ended with exit code `code`: start it again if it crashed, and not too often."""
    if s.stop is not None:
        return EndAgent(s.stop.code, s.stop.reason)
    if code == 0 or terminated or s.membership.progress.finished:
        return EndAgent(code)
    if before.launches_left == 0:
        return EndAgent(code, f"the trainer crashed {before.launch} times, max_restarts is {s.settings.max_restarts}")
    return LaunchCommand(before.launch + 1, RESTART_PAUSE_S, before.launches_left - 1)
