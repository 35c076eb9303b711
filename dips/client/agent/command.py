"""Runs the training command: launches it, waits for its end, stops it when necessary, and launches it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from dips.client.agent.actions import Actions, RecordMark
from dips.client.agent.core import AgentCore
from dips.client.agent.error_tail import ErrorTail
from dips.client.agent.restarts import EndAgent, LaunchCommand
from dips.client.agent.signals import AgentSignals
from dips.client.agent.trainer import TrainerProcess, kill_leftovers
from dips.protocol.heartbeats import MOST_LINES
from dips.telemetry.logs import Log

FAILURE_GRACE_S = 10.0  # for a trainer to report why it cannot continue, before it is stopped


# Between SIGTERM and SIGKILL of the trainer: time to save a checkpoint of a large model. Launchers may allow less:
# Kubernetes and Slurm 30 s by default to the agent, torchrun 30 s to its ranks, or --shutdown-timeout.
END_GRACE_S = 300.0


class CommandRunner:
    """Runs one training command, or serves a trainer that others start."""

    def __init__(
        self,
        core: AgentCore,
        perform: Callable[[Actions], None],
        signals: AgentSignals,
        log: Log,
        end_grace_s: float = END_GRACE_S,
    ) -> None:
        """Create a runner; `end_grace_s` is the time between SIGTERM and SIGKILL of the trainer."""
        self._core, self._perform, self._signals, self._log = core, perform, signals, log
        self._end_grace_s = end_grace_s
        self._tail: ErrorTail | None = None  # standard error of the newest launch; None: there was no launch
        self._lines_before: tuple[str, ...] = ()  # last lines of the launch before

    async def run(self, command: Sequence[str], environment: dict[str, str]) -> int:
        """Launch the command until it ends by itself, is stopped, or has crashed too often; return the exit code."""
        plan: LaunchCommand | EndAgent = self._core.plan_first_launch()
        while isinstance(plan, LaunchCommand):
            code, last_line = await self._launch_once(plan.launch, command, environment)
            plan = self._core.plan_next_launch(plan, code, self._signals.terminated.is_set(), last_line)
            if isinstance(plan, LaunchCommand) and await self._signals.wait_terminated(plan.delay_s):
                return code
        self._perform(self._core.tick(time.monotonic()))  # what was remarked at the end
        if plan.reason:
            self._log.error("stopped", reason=plan.reason)
        return plan.code

    async def serve_others(self) -> int:
        """Wait until the trainer that others started detaches or must stop; return the exit code."""
        events = (self._signals.detached, self._signals.terminated, self._signals.stopped)
        ends = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        stop = self._core.state.stop
        if stop is None:
            return 0
        self._log.error("stopped", reason=stop.reason)
        until = time.monotonic() + FAILURE_GRACE_S
        while self._core.state.trainer.alive and time.monotonic() < until:  # the trainer gets the reason as an answer
            await asyncio.sleep(0.1)
        return stop.code

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines on the training command's standard error; those of the former launch if this one
        printed none.
        """
        lines = () if self._tail is None else self._tail.last_lines(MOST_LINES)
        return lines or self._lines_before

    async def _launch_once(self, launch: int, command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
        """Launch the command and wait for its end; return its exit code and its last line on standard error."""
        self._lines_before = self.last_lines()
        tail = self._tail = ErrorTail()
        try:
            process = await TrainerProcess.start(command, {**environment, "DIPS_ATTEMPT": str(launch)}, tail.writer)
        finally:
            tail.close_writer()
        self._perform([RecordMark("trainer_start", {"attempt": launch, "pid": process.pid})])
        code = await self._wait_or_end(process)
        left = kill_leftovers()
        self._perform(self._core.on_trainer_gone(f"the trainer ended with exit code {code}", time.monotonic()))
        self._perform([RecordMark("trainer_end", {"attempt": launch, "code": code, "killed": len(left)})])
        return code, await asyncio.to_thread(tail.finish)

    async def _wait_or_end(self, process: TrainerProcess) -> int:
        """Wait for the process to end; stop it if SIGTERM arrived or the core ordered it. Return its exit code."""
        ended = asyncio.create_task(process.wait())
        must_end = [asyncio.create_task(e.wait()) for e in (self._signals.terminated, self._signals.stopped)]
        try:
            await asyncio.wait({ended, *must_end}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and self._signals.stopped.is_set():  # the trainer gets and reports the reason
                await asyncio.wait({ended}, timeout=FAILURE_GRACE_S)
            return ended.result() if ended.done() else await process.end_within(self._end_grace_s)
        finally:
            for task in (ended, *must_end):
                task.cancel()
