"""Serves the connections of ranks: passes each message of rank 0 to the core, and the core's answer back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from dips.client.agent.actions import Actions
from dips.client.agent.core import AgentCore
from dips.client.agent.signals import AgentSignals
from dips.client.ipc.connection import Connection
from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    Attached,
    Detach,
    ErrorReply,
    Message,
    Noted,
    PullNow,
    PushNow,
)
from dips.dataclass import replace
from dips.errors import Denied, DipsError, RemoteProtocolError
from dips.protocol.effects import Grant
from dips.telemetry.logs import Log
from dips.telemetry.refusals import count_refusal

MOST_REMOTE = 8192  # connections of ranks on other hosts, one per rank: the ranks of the largest job
MOST_LOCAL = 256  # connections over the Unix socket: one of rank 0, briefly two when it is restarted


class RankServer:
    """Serves rank connections and tracks the attempt of each; the core decides all answers."""

    def __init__(
        self,
        core: AgentCore,
        hold_s: float,
        perform: Callable[[Actions], None],
        signals: AgentSignals,
        rewrite: Callable[[Grant], Grant],
        log: Log,
    ) -> None:
        """Create a server; `hold_s` is the longest time that a question is held open for an answer."""
        self._core, self._hold_s, self._perform = core, hold_s, perform
        self._signals, self._rewrite, self._log = signals, rewrite, log
        self._remote = 0  # connections over the network
        self._local = 0

    async def serve_local(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a rank on this host."""
        if self._local >= MOST_LOCAL:
            self._refuse(writer, "agent_line_full", connections=self._local)
            return
        self._local += 1
        try:
            await self._serve_connection(Connection(reader, writer))
        finally:
            self._local -= 1

    def _refuse(self, writer: asyncio.StreamWriter, why: str, **fields: Any) -> None:
        count_refusal(why)
        self._log.warning(why, **fields)
        writer.close()

    def serve_with(self, token: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        """Return a connection handler for ranks that connect over the network and know the token."""

        async def serve_remote(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._remote >= MOST_REMOTE:
                self._refuse(writer, "agent_line_full", connections=self._remote)
                return
            self._remote += 1
            try:
                await self._serve_connection(await Connection.admit_rank(reader, writer, token))
            except (Denied, TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
                peer = writer.get_extra_info("peername")
                self._refuse(writer, "agent_line_refused", peer=str(peer), error=str(error) or type(error).__name__)
            finally:
                self._remote -= 1

        return serve_remote

    async def _serve_connection(self, rank: Connection) -> None:
        """Answer one connection until it ends; if rank 0's ends without Detach, its attempt ends.

        Other ranks on other hosts send nothing: they hold the connection to notice the agent's end (orphan.py).
        """
        attempt = 0
        try:
            while True:
                message = await rank.read_message()
                answer = await self._await_answer(message)
                if isinstance(answer, Attached):
                    attempt = answer.attempt
                if answer is not None:
                    await rank.write_message(answer)
                if isinstance(message, Detach) and isinstance(answer, Noted):
                    attempt = 0
                    self._signals.detached.set()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            if attempt:
                self._log.info("rank 0 hung up", attempt=attempt)
        except asyncio.CancelledError:
            pass  # the agent ends; Python 3.11's asyncio prints a traceback if a connection's task is cancelled
        except RemoteProtocolError as error:
            count_refusal("agent_line_malformed")
            self._log.warning("rank 0 was not understood", error=str(error))
        finally:
            if attempt:
                self._perform(self._core.on_hang_up(attempt, time.monotonic()))
            rank.close()

    async def _await_answer(self, message: Message) -> Answer | None:
        """Ask the core again after each change, until it has an answer or `hold_s` has passed."""
        until = time.monotonic() + self._hold_s
        while True:
            change = self._signals.next_change()
            answer, actions = self._core.on_message(message, time.monotonic())
            self._perform(actions)
            left_s = until - time.monotonic()
            if isinstance(answer, PushNow | PullNow):
                return self._route_lanes(answer)
            if not isinstance(answer, AskAgain) or left_s <= 0 or getattr(message, "at_once", False):
                return answer
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await change.wait()

    def _route_lanes(self, answer: PushNow | PullNow) -> Answer:
        try:
            return replace(answer, grant=self._rewrite(answer.grant))
        except DipsError as error:
            return ErrorReply(type(error).__name__, str(error))
