"""The agent's daemon: performs the core's actions, runs the training command, calls the master, reports the results."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, cast

from grpc import aio

from dips.client.agent.account import NO_INCARNATION, PastIncarnation
from dips.client.agent.core import AgentCore
from dips.client.agent.rank_server import AgentSignals, RankServer
from dips.client.agent.restarts import EndAgent, LaunchCommand
from dips.client.agent.state import Actions, AskMaster, Channel, RecordMark, SaveIncarnation, SendHeartbeat, StopTrainer
from dips.client.agent.trainer import ErrorTail, TrainerProcess, kill_leftovers
from dips.config import ClusterFile
from dips.dataclass import replace
from dips.differences import differing_options
from dips.errors import Busy, ConfigError, Denied, DifferentModel, DipsError, Unavailable, UnavailableMaster
from dips.protocol.effects import Grant, Result
from dips.protocol.events import (
    ClusterJoined,
    ClusterLeft,
    ManifestOffered,
    ProbeAsked,
    PullFinished,
    PullRequested,
    PushAborted,
    PushFinished,
    PushRequested,
    RangesRequested,
    RoundAwaited,
)
from dips.protocol.heartbeats import MOST_LINES, ClusterHeartbeat, ClusterHeartbeatAnswer
from dips.tasks import start_task
from dips.telemetry.logs import Log
from dips.telemetry.timeline import Timeline
from dips.transport import control
from dips.transport.endpoints import Endpoint
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceStub
from dips.wire.generated.status_pb2 import DescribeRequest
from dips.wire.generated.status_pb2_grpc import StatusServiceStub
from dips.wire.messages import from_proto, to_proto, unwrap_oneof

# ---- incarnation file -----------------------------------------------------------------------------------------------
# The file that an agent leaves in its directory for the next one: its incarnation and the tokens that it consumed.
#
# Heartbeats report both to the master, which keeps them in memory; if both processes die, the next agent here still
# knows the tokens and reports them as lost. The file is written aside and renamed, before each heartbeat and before a
# push can be settled (actions.SAVED_AT). It is not fsynced: it must survive the process, not the machine.


FILE = "incarnation.json"


class IncarnationFile:
    """The incarnation file of one directory; the holder of `agent.pid` owns it."""

    def __init__(self, directory: Path, run: str, cluster: str, log: Log) -> None:
        self._path, self._whose, self._log = directory / FILE, {"run": run, "cluster": cluster}, log
        self._saved: PastIncarnation | None = None
        self._fails = False

    def read_former(self) -> PastIncarnation:
        """Return what the last agent here saved; NO_INCARNATION if there is none, or if it is another run's or
        cluster's.
        """
        try:
            found = json.loads(self._path.read_text())
            past = PastIncarnation(int(found["inc"]), int(found["tokens_consumed"]))
            return past if found.items() >= self._whose.items() else NO_INCARNATION
        except FileNotFoundError:
            return NO_INCARNATION
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            done = "tokens that the last agent here did not report stay unreported"
            self._log.warning("incarnation_not_read", path=str(self._path), error=str(error), done=done)
            return NO_INCARNATION

    def save_incarnation(self, past: PastIncarnation) -> None:
        """Save an incarnation; a failure (a full disk) is logged and does not stop training."""
        if past == self._saved:
            return
        aside = self._path.with_suffix(".new")
        try:
            aside.write_text(json.dumps({**self._whose, "inc": past.inc, "tokens_consumed": past.consumed}))
            aside.replace(self._path)
            self._saved, self._fails = past, False
        except OSError as error:
            if not self._fails:
                self._log.warning("incarnation_not_written", path=str(self._path), error=str(error))
            self._fails = True


# ---- master link ----------------------------------------------------------------------------------------------------
# The agent's calls to the master: each question is one gRPC call; the master's errors are raised as their classes.
#
# Heartbeats have their own connection, so that no long poll delays them. This file does not know what a question means
# or when it is legal.


CALL_S = 10.0  # a question that the master answers at once
POLL_S = 30.0  # a question that the master may hold open for about 10 s

# Question → (method of ClusterService, deadline).
CALLS: Mapping[type, tuple[str, float]] = {
    ClusterJoined: ("Join", CALL_S),
    ManifestOffered: ("CompareManifest", CALL_S),
    PushRequested: ("RequestPush", POLL_S),
    PushFinished: ("FinishPush", POLL_S),
    PushAborted: ("AbortPush", CALL_S),
    RoundAwaited: ("AwaitRound", POLL_S),
    PullRequested: ("RequestPull", POLL_S),
    PullFinished: ("FinishPull", CALL_S),
    ProbeAsked: ("AdmitProbe", POLL_S),
    RangesRequested: ("RequestRanges", POLL_S),
    ClusterLeft: ("Leave", CALL_S),
}


class MasterLink:
    """Two channels to one master; they connect at the first call and reconnect after each loss."""

    def __init__(self, peer: Endpoint, shared: Mapping[str, Any]) -> None:
        """Open the channels; `shared` is this cluster's shared options, to name those that differ from the run's."""
        self._peer, self._shared = peer, shared
        self._channels: tuple[aio.Channel, aio.Channel] = (control.open_channel(peer), control.open_channel(peer))
        self._questions, self._heartbeats = (ClusterServiceStub(channel) for channel in self._channels)

    async def ask_master(self, event: object) -> Result:
        """Send a question and return the reply. Raises UnavailableMaster if none comes in time, and the errors the
        master raised.
        """
        method, deadline_s = CALLS[type(event)]
        try:
            reply = await self._call_method(getattr(self._questions, method), event, deadline_s)
        except DifferentModel:
            raise
        except ConfigError as error:
            raise await self._name_keys(error) from error
        return cast(Result, unwrap_oneof(reply))

    async def send_heartbeat(self, heartbeat: ClusterHeartbeat, deadline_s: float) -> ClusterHeartbeatAnswer:
        """Send a heartbeat and return its answer; raises as `ask_master` does."""
        return from_proto(
            await self._call_method(self._heartbeats.Heartbeat, heartbeat, deadline_s), ClusterHeartbeatAnswer
        )

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _name_keys(self, refused: ConfigError) -> ConfigError:
        """Return the refusal with the names of the keys that differ; the master, which compared digests, is asked for
        its options.
        """
        describe = StatusServiceStub(self._channels[0]).Describe
        try:
            reply = await control.call_method(
                describe, DescribeRequest(), deadline_s=CALL_S, peer=self._peer, unavailable=UnavailableMaster
            )
            lines = differing_options(self._shared, json.loads(reply.json)["shared"])
        except DipsError:
            return refused
        return ConfigError("; ".join(lines) + ": copy the run file's section `shared`") if lines else refused

    async def _call_method(self, method: Any, event: object, deadline_s: float) -> Any:
        try:
            return await control.call_method(
                method, to_proto(event), deadline_s=deadline_s, peer=self._peer, unavailable=UnavailableMaster,
                explain=isinstance(event, ClusterJoined),
            )  # fmt: skip
        except UnavailableMaster as error:  # gRPC does not tell that the TLS handshake failed
            if self._peer.tls is not None and (expired := self._peer.tls.find_expiry()):
                raise Denied(expired) from error
            raise


# ---- command --------------------------------------------------------------------------------------------------------
# Runs the training command: launches it, waits for its end, stops it when necessary, and launches it again.


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


# ---- agent ----------------------------------------------------------------------------------------------------------
# The agent's daemon: performs the core's actions and reports their results back to it.
#
# All decisions are in core.py. One event loop owns the core; every task calls it and performs what it returns, so no
# lock is needed. Sockets and channels are made in app.py.


# Marks that every successful outer step writes; logged at level debug.
ROUTINE = frozenset({"push_begin", "push_end", "window_begin", "window_end", "pull_begin", "pull_end"})
LEAVE_S = 3.0  # for telling a master, which may be down, that this cluster leaves


def mark_level(kind: str, fields: Mapping[str, object]) -> str:
    """Return the log level of a mark: debug if it is routine and succeeded, warning for remarks, else info; "" for
    inner steps, which are not logged.
    """
    if kind == "inner":
        return ""
    if kind == "remark":
        return "warning"
    return "debug" if kind in ROUTINE and fields.get("ok", True) else "info"


class MasterPort(Protocol):
    """The calls to the master that the agent needs."""

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
        if level := mark_level(kind, fields):
            getattr(self._log, level)(kind, **fields)

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
