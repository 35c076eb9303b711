"""The agent's daemon: performs the core's actions and reports their results back to it.

All decisions are in core.py. One event loop owns the core; every task calls it and performs what it returns, so no lock
is needed. Sockets and channels are made in app.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol

from dips.client.agent.account import PastIncarnation
from dips.client.agent.actions import (
    Actions,
    AskMaster,
    Channel,
    RecordMark,
    SaveIncarnation,
    SendHeartbeat,
    StopTrainer,
)
from dips.client.agent.command import CommandRunner
from dips.client.agent.core import AgentCore
from dips.client.agent.rank_server import RankServer
from dips.client.agent.signals import AgentSignals
from dips.config import ClusterFile
from dips.dataclass import replace
from dips.errors import Busy, DipsError, Unavailable
from dips.protocol.effects import Grant, Result
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer
from dips.tasks import start_task
from dips.telemetry.logs import Log
from dips.telemetry.timeline import Timeline

# Marks that every successful outer step writes; logged at level debug.
ROUTINE = frozenset({"push_begin", "push_end", "window_begin", "window_end", "pull_begin", "pull_end"})
LEAVE_S = 3.0  # for telling a master, which may be down, that this cluster leaves


class MasterPort(Protocol):
    """The calls to the master that the agent needs; see master_link.py."""

    async def ask_master(self, event: object) -> Result: ...

    async def send_heartbeat(self, heartbeat: ClusterHeartbeat, deadline_s: float) -> ClusterHeartbeatAnswer: ...


class Agent:
    """One agent daemon: `run` returns when it ends, `ranks` serves the connections of its ranks."""

    def __init__(
        self,
        config: ClusterFile,
        core: AgentCore,
        master: MasterPort,
        timeline: Timeline,
        log: Log,
        rewrite: Callable[[Grant], Grant] = lambda grant: grant,
        save: Callable[[PastIncarnation], None] = lambda past: None,
        find_problem: Callable[[], str] = lambda: "",
    ) -> None:
        """Wire the core to the master, the timeline and the training command.

        rewrite       turns the master's grant into the one the ranks get: a relay puts its own addresses in
        save          saves what the next agent needs if this one dies
        find_problem  returns why renewed certificates are not used, "" if they are
        """
        self._core, self._master, self._save, self._find_problem = core, master, save, find_problem
        self._timeline, self._log = timeline, log
        self._signals = AgentSignals()
        self._tasks = set[asyncio.Task[None]]()
        self._asking: dict[Channel, asyncio.Task[None]] = {}
        self._deadline_moved = asyncio.Event()
        self._command = CommandRunner(core, self.perform_actions, self._signals, log)
        self.ranks = RankServer(core, config.poll_s / 2, self.perform_actions, self._signals, rewrite, log)

    def terminate(self) -> None:
        """Handle SIGTERM: stop the trainer, leave the run, return from `run`."""
        self._signals.terminated.set()

    async def run(self, command: Sequence[str], environment: dict[str, str]) -> int:
        """Keep the trainer running until it ends, cannot continue, or SIGTERM arrives; return the exit code.

        Without a command the trainer is started by others: it is served across its restarts until it detaches.
        """
        self._spawn_task(self._keep_time())
        try:
            code = await (self._command.run(command, environment) if command else self._command.serve_others())
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._leave_run()
        return code

    def perform_actions(self, actions: Actions) -> None:
        """Perform the core's actions in order, and wake the tasks that wait for a change."""
        for action in actions:
            match action:
                case AskMaster():
                    self._start_asking(action)
                case SendHeartbeat():
                    self._spawn_task(self._carry_heartbeat(action))
                case SaveIncarnation(past):
                    self._save(past)
                case RecordMark(kind, fields):
                    self._timeline.record_mark(kind, **fields)
                    self._log_mark(kind, fields)
                case StopTrainer():
                    self._signals.stopped.set()
        if actions:
            self._signals.notify_change()

    def _log_mark(self, kind: str, fields: Mapping[str, object]) -> None:
        """Log a mark: routine marks at level debug, remarks as warnings, all others except inner steps as info."""
        if kind == "remark":
            self._log.warning(kind, **fields)
        elif kind != "inner":
            routine = kind in ROUTINE and fields.get("ok", True)
            (self._log.debug if routine else self._log.info)(kind, **fields)

    # ---- the master ------------------------------------------------------------------------------------------------

    def _start_asking(self, ask: AskMaster) -> None:
        older = self._asking.get(ask.channel)
        if older and older is not asyncio.current_task():
            older.cancel()  # it must not arrive at a master that comes back later
        self._asking[ask.channel] = self._spawn_task(self._carry_question(ask))

    async def _carry_question(self, ask: AskMaster) -> None:
        await asyncio.sleep(ask.delay_s)
        question = type(ask.event).__name__
        try:
            result = await self._master.ask_master(ask.event)
        except DipsError as error:
            what = "asks the master again" if isinstance(error, Unavailable | Busy) else "the master refused"
            self._log.warning(what, question=question, error=str(error))
            self.perform_actions(self._core.on_error(ask, error, time.monotonic()))
        else:
            self.perform_actions(self._core.on_reply(ask, result, time.monotonic()))
        self._signals.notify_change()

    async def _carry_heartbeat(self, action: SendHeartbeat) -> None:
        heartbeat = replace(action.heartbeat, lines=self._command.last_lines())
        try:
            answer = await self._master.send_heartbeat(heartbeat, action.deadline_s)
        except DipsError as error:
            self._log.warning("a heartbeat was not answered", error=str(error))
            self.perform_actions(self._core.on_heartbeat_error(error, time.monotonic()))
        else:
            self.perform_actions(self._core.on_heartbeat_reply(action.heartbeat.inc, answer, time.monotonic()))
        self._deadline_moved.set()
        self._signals.notify_change()

    async def _keep_time(self) -> None:
        """Call the core whenever one of its deadlines is due."""
        while True:
            self._deadline_moved.clear()
            self.perform_actions(self._core.on_certificate(self._find_problem()))
            self.perform_actions(self._core.tick(time.monotonic()))
            due = self._core.next_deadline()
            pause_s = due - time.monotonic() if isfinite(due) else None
            try:
                async with asyncio.timeout(pause_s):
                    await self._deadline_moved.wait()
            except TimeoutError:
                pass  # it is due

    async def _leave_run(self) -> None:
        event = self._core.leave_run()
        if event is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._master.ask_master(event)
        except (DipsError, TimeoutError) as error:
            self._log.warning("could not take leave of the master; the lease will end", error=str(error))

    # ---- tasks -----------------------------------------------------------------------------------------------------

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = start_task(work, self.fail)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def fail(self, error: BaseException) -> None:
        """Log the failure of a task, which is a bug of this program, and stop."""
        self._log.error("a task of the agent failed", exc_info=error)
        self.perform_actions(self._core.on_bug(error))
