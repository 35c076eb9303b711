"""The agent's doing part: it asks the master, beats, serves rank 0 and keeps the trainer alive.

Everything that it decides it asks the session. One event loop owns the session; every task calls it and does what it
orders, so no lock is needed. Where sockets and channels come from it does not know (app.py).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from dips.client.agent.account import PastIncarnation
from dips.client.agent.actions import KEPT_AT, Action, AskMaster, RecordMark, SendHeartbeat, StopTrainer
from dips.client.agent.session import Session
from dips.client.agent.trainer import Trainer, kill_leftovers
from dips.client.ipc import messages
from dips.client.ipc.connection import Connection
from dips.client.ipc.messages import AskAgain, Attached, Bye, ErrorReply, Heard, PullNow, PushNow
from dips.config import ClusterFile
from dips.errors import Busy, Denied, DipsError, RemoteProtocolError, Unavailable
from dips.protocol.effects import Grant, Result
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer
from dips.telemetry.logs import Log
from dips.telemetry.timeline import Timeline
from dips.transport.backoff import Backoff

FIRST_PAUSE_S = 0.2  # before the second try to reach the master; doubles up to retry_s
END_GRACE_S = 20.0  # between SIGTERM and SIGKILL of a trainer
FAILURE_GRACE_S = 10.0  # for a trainer to report why it cannot go on, before it is ended
LEAVE_S = 3.0  # to say goodbye to a master that may be gone
MOST_REMOTE = 8192  # connections of ranks on other hosts, one each: ranks of the largest job
RESTART_PAUSE_S = 1.0  # a trainer that crashes at once does not spin


class MasterPort(Protocol):
    """What the agent needs of a master; see master_link.py."""

    async def ask(self, event: object) -> Result: ...

    async def beat(self, beat: ClusterHeartbeat, deadline_s: float) -> ClusterHeartbeatAnswer: ...


class Agent:
    """One agent; `run` is its life, `serve` the life of one connection of rank 0."""

    def __init__(
        self,
        config: ClusterFile,
        session: Session,
        master: MasterPort,
        timeline: Timeline,
        log: Log,
        rewrite: Callable[[Grant], Grant] = lambda grant: grant,
        keep: Callable[[PastIncarnation], None] = lambda life: None,
    ) -> None:
        """
        rewrite  turns a grant into the one that the ranks are given: a relay puts its own addresses in
        keep     leaves behind what the next agent must know, if this one dies
        """
        self._config, self._session, self._master = config, session, master
        self._rewrite, self._keep = rewrite, keep
        self._timeline, self._log = timeline, log
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()  # replaced at each change
        self._hurry, self._reachable = asyncio.Event(), asyncio.Event()
        self._terminated, self._stopped, self._goodbye = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._stop: StopTrainer | None = None
        self._remote = 0  # connections over the network

    def terminate(self) -> None:
        """SIGTERM: end the trainer, leave, return from `run`."""
        self._terminated.set()

    async def run(self, command: Sequence[str], environment: dict[str, str]) -> int:
        """Keep the trainer going until it ends, cannot go on, or we are told to stop; return the exit code.

        Without a command others start the trainer: it is served, as often as it begins anew, until it says goodbye.
        """
        beats = self._spawn(self._beat())
        try:
            code = await (self._live(command, environment) if command else self._serve_others())
        finally:
            tasks = [beats, *self._asking.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await self._leave()
        return code

    # ---- the trainer ---------------------------------------------------------------------------------------------

    async def _live(self, command: Sequence[str], environment: dict[str, str]) -> int:
        for life in range(1, self._config.max_restarts + 2):
            code = await self._one_life(life, command, environment)
            if self._stop:
                self._log.error("stopped", reason=self._stop.reason)
                return self._stop.code
            if code == 0 or self._terminated.is_set() or self._session.progress.finished:
                return code
            left = self._config.max_restarts + 1 - life
            self._log.warning("trainer crashed", code=code, life=life, restarts_left=left)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._terminated.wait(), RESTART_PAUSE_S)
            if self._terminated.is_set():
                return code
        self._log.error("trainer crashed too often", code=code, max_restarts=self._config.max_restarts)
        return code

    async def _serve_others(self) -> int:
        ends = [asyncio.create_task(end.wait()) for end in (self._goodbye, self._terminated, self._stopped)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if self._stop is None:
            return 0
        self._log.error("stopped", reason=self._stop.reason)
        until = time.monotonic() + FAILURE_GRACE_S
        while self._session.alive and time.monotonic() < until:  # it is being told why
            await asyncio.sleep(0.1)
        return self._stop.code

    async def _one_life(self, life: int, command: Sequence[str], environment: dict[str, str]) -> int:
        trainer = await Trainer.start(command, {**environment, "DIPS_ATTEMPT": str(life)})
        self._do([RecordMark("trainer_start", {"attempt": life, "pid": trainer.pid})])
        code = await self._watch(trainer)
        left = kill_leftovers()
        self._do(self._session.trainer_gone(f"the trainer ended with exit code {code}", time.monotonic()))
        self._do([RecordMark("trainer_end", {"attempt": life, "code": code, "killed": len(left)})])
        return code

    async def _watch(self, trainer: Trainer) -> int:
        """Wait for its end, or bring it about."""
        ended = asyncio.create_task(trainer.wait())
        told, stopped = asyncio.create_task(self._terminated.wait()), asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({ended, told, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and self._stop:  # it is being told why; let it say so itself
                await asyncio.wait({ended}, timeout=FAILURE_GRACE_S)
            return ended.result() if ended.done() else await trainer.end(END_GRACE_S)
        finally:
            for task in (ended, told, stopped):
                task.cancel()

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a rank on this host."""
        await self._converse(Connection(reader, writer))

    def admitting(self, token: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        """What serves ranks that dial over the network, if they know the token."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._remote >= MOST_REMOTE:
                self._log.warning("agent_line_full", connections=self._remote)
                writer.close()
                return
            self._remote += 1
            try:
                await self._converse(await Connection.admit(reader, writer, token))
            except (Denied, TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
                peer = writer.get_extra_info("peername")
                self._log.warning("agent_line_refused", peer=str(peer), error=str(error) or type(error).__name__)
                writer.close()
            finally:
                self._remote -= 1

        return serve

    async def _converse(self, rank: Connection) -> None:
        """Answer one connection until it ends; the end of rank 0's without Bye is the end of its attempt.

        Other ranks of other hosts say nothing: they hold the line to see us end (orphan.py).
        """
        attempt = 0
        try:
            while True:
                message = await rank.read()
                answer = await self._answer(message)
                if isinstance(answer, Attached):
                    attempt = answer.attempt
                if answer is not None:
                    await rank.write(answer)
                if isinstance(message, Bye) and isinstance(answer, Heard):
                    attempt = 0
                    self._goodbye.set()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            if attempt:
                self._log.info("rank 0 hung up", attempt=attempt)
        except RemoteProtocolError as error:
            self._log.warning("rank 0 was not understood", error=str(error))
        finally:
            if attempt and attempt == self._session.attempt:
                self._do(self._session.trainer_gone("rank 0 is gone", time.monotonic()))
            rank.close()

    async def _answer(self, message: messages.Message) -> messages.Answer | None:
        """Ask the session until it has an answer, for at most poll_s (half of it: rank 0 must not wait longer)."""
        until = time.monotonic() + self._config.poll_s / 2
        while True:
            changed = self._changed
            answer, deeds = self._session.hear(message, time.monotonic())
            self._do(deeds)
            left = until - time.monotonic()
            if isinstance(answer, PushNow | PullNow):
                return self._routed(answer)
            if not isinstance(answer, AskAgain) or left <= 0 or getattr(message, "at_once", False):
                return answer
            if changed is self._changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left)

    def _routed(self, answer: PushNow | PullNow) -> messages.Answer:
        try:
            return replace(answer, grant=self._rewrite(answer.grant))
        except DipsError as error:
            return ErrorReply(type(error).__name__, str(error))

    # ---- the master ----------------------------------------------------------------------------------------------

    def _do(self, deeds: Iterable[Action]) -> None:
        """Do what the session ordered, in its order, and wake who waits for a change."""
        done = False
        for deed in deeds:
            done = True
            match deed:
                case AskMaster():
                    self._start_asking(deed)
                case RecordMark(kind, fields):
                    self._timeline.mark(kind, **fields)
                    if kind in KEPT_AT:
                        self._keep(self._session.lived)
                    if kind != "inner":
                        self._log.info(kind, **fields)
                case SendHeartbeat():
                    self._hurry.set()
                case StopTrainer():
                    self._stop = self._stop or deed
                    self._stopped.set()
        if done:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _start_asking(self, ask: AskMaster) -> None:
        older = self._asking.get(ask.channel)
        if older and older is not asyncio.current_task():
            older.cancel()
        self._asking[ask.channel] = self._spawn(self._carry(ask))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose failure is our bug, and ends us loudly instead of leaving us deaf."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._fallen)
        return task

    def _fallen(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("a task of the agent failed", exc_info=error)
            self._do([StopTrainer(70, f"{type(error).__name__}: {error}")])

    async def _carry(self, ask: AskMaster) -> None:
        """Carry one question to the master, again and again until he answers; hand the answer to the session."""
        await asyncio.sleep(ask.delay_s)
        backoff = Backoff(FIRST_PAUSE_S, self._config.retry_s, random.Random())
        while True:
            try:
                result = await self._master.ask(ask.event)
            except (Unavailable, Busy) as error:
                self._log.warning("the master does not answer", question=type(ask.event).__name__, error=str(error))
                self._do(self._session.hindered(str(error), time.monotonic()))
                self._wake()
                if self._asking.get(ask.channel) is not asyncio.current_task():
                    return None  # the session asks something else now: this must not reach a master that comes back
                await self._pause(backoff.next_pause_s())
            except DipsError as error:
                self._log.warning("the master refused", question=type(ask.event).__name__, error=str(error))
                self._do(self._session.failed(ask.number, error, time.monotonic()))
                return self._wake()
            else:
                self._do(self._session.answered(ask.number, result, time.monotonic()))
                return self._wake()

    async def _pause(self, pause_s: float) -> None:
        """Wait; a heartbeat that reaches the master ends it."""
        self._reachable.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reachable.wait(), pause_s)

    async def _beat(self) -> None:
        while True:
            self._keep(self._session.lived)
            beat = self._session.beat()
            if beat is not None:
                await self._say(beat)
            self._hurry.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self._config.beat_s)

    async def _say(self, beat: ClusterHeartbeat) -> None:
        try:
            answer = await self._master.beat(beat, max(self._config.beat_s, 1.0))
        except (Unavailable, Busy) as error:
            self._log.warning("a beat was not heard", error=str(error))
            # A question on a link that went silent ends by its own deadline, half a minute later: beats know sooner.
            self._do(self._session.hindered(str(error), time.monotonic()))
            self._wake()
        except DipsError as error:
            self._log.error("a beat was refused", error=str(error))
        else:
            self._reachable.set()
            self._do(self._session.beat_answered(beat.inc, answer, time.monotonic()))

    async def _leave(self) -> None:
        event = self._session.leave()
        if event is None:
            return
        try:
            await asyncio.wait_for(self._master.ask(event), LEAVE_S)
        except (DipsError, TimeoutError) as error:
            self._log.warning("left without a goodbye; the lease will end it", error=str(error))
