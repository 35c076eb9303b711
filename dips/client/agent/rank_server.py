"""The sockets on which ranks reach the agent, and the connections on them."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from dips.client.agent.core import AgentCore
from dips.client.agent.state import Actions
from dips.client.ipc import messages
from dips.client.ipc.address import AGENT, TOKEN, over_network, reach_socket, socket_path, token_of
from dips.client.ipc.messages import Answer, AskAgain, Attached, Detach, ErrorReply, Message, Noted, PullNow, PushNow
from dips.client.ipc.seal import ANSWER, TAG, Seal, TokenServer, keep_alive
from dips.config import ClusterFile
from dips.dataclass import replace
from dips.errors import ConfigError, Denied, DipsError, RemoteProtocolError
from dips.protocol.effects import Grant
from dips.telemetry.logs import Log
from dips.telemetry.refusals import count_refusal

# ---- signals --------------------------------------------------------------------------------------------------------
# Events by which the tasks of one agent notify each other.


class AgentSignals:
    """The events of one agent: each is set once, except changes, which are announced repeatedly."""

    def __init__(self) -> None:
        self.terminated = asyncio.Event()  # SIGTERM
        self.stopped = asyncio.Event()  # the core has ordered StopTrainer
        self.detached = asyncio.Event()  # a trainer that others started has detached
        self._change = asyncio.Event()

    def notify_change(self) -> None:
        """Wake the tasks that wait for a change of the core's state."""
        self._change.set()
        self._change = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Return an event that the next `notify_change` sets; take it before reading the core, so that no change is
        missed.
        """
        return self._change

    async def wait_terminated(self, seconds: float) -> bool:
        """Wait `seconds` or until SIGTERM arrives; return whether it arrived."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.terminated.wait()
        return self.terminated.is_set()


# ---- connection -----------------------------------------------------------------------------------------------------
# One connection of a rank, on the agent's side: whole messages in and out, sealed if it came from the network.


ADMIT_S = 10.0  # time for a rank to prove that it knows the token


class Connection:
    """Reads and writes whole messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seal: Seal | None = None) -> None:
        self._reader, self._writer, self._seal = reader, writer, seal

    @classmethod
    async def admit_rank(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> Connection:
        """Admit a rank that proves the token. Raises Denied, TimeoutError, or the error of a broken connection."""
        keep_alive(writer.get_extra_info("socket"))
        host = TokenServer(token)
        writer.write(host.greeting)
        async with asyncio.timeout(ADMIT_S):
            answer = await reader.readexactly(ANSWER)
        proof, seal = host.admit_rank(answer)
        writer.write(proof)
        return cls(reader, writer, seal)

    @property
    def peer(self) -> str:
        """The rank's host, for the log."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else "this host"

    async def read_message(self) -> Message:
        """Return the next message. Raises IncompleteReadError at the end, RemoteProtocolError for an invalid
        message.
        """
        head = await self._reader.readexactly(messages.LENGTH.size)
        body = await self._reader.readexactly(messages.body_length(head))
        if self._seal:
            self._seal.check_frame(head + body, await self._reader.readexactly(TAG))
        return messages.decode_message(body)

    async def write_message(self, message: Message) -> None:
        frame = messages.encode_message(message)
        self._writer.write(frame + self._seal.tag_frame(frame) if self._seal else frame)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


# ---- listen ---------------------------------------------------------------------------------------------------------
# The sockets on which ranks reach the agent: a Unix socket for its own user, and a TCP port for a job on several hosts.


RESOLVE_S = 60.0  # the name of a pod is resolvable only some seconds after its start
AGAIN_S = 1.0


@asynccontextmanager
async def listen_for_ranks(config: ClusterFile, ranks: RankServer, log: Log) -> AsyncIterator[dict[str, str]]:
    """Serve ranks; yields the environment variables through which a rank finds the agent."""
    path, remote = socket_path(config), over_network(config)
    with reach_socket(path) as near:
        servers = [await _on_this_host(path, near, ranks)]
        environment = {AGENT: f"unix:{path}"}
        try:
            if remote is not None:
                token = token_of(config) or secrets.token_hex(32).encode()
                server, host = await _on_any_host(remote, ranks, token)
                servers.append(server)
                address, port = server.sockets[0].getsockname()[:2]
                environment = {AGENT: f"tcp://{host}:{port}", TOKEN: token.decode()}
                log.info("agent_line", address=f"{host}:{port}", bound=address)
            yield environment
        finally:
            for server in servers:
                server.close()
            path.unlink(missing_ok=True)


async def _on_this_host(path: Path, near: str, ranks: RankServer) -> asyncio.Server:
    """Listen on the Unix socket for rank 0, which only this user can open. The kernel is given `near` for `path`."""
    path.unlink(missing_ok=True)  # left by an agent that was killed; the pid file's lock shows that none runs
    mask = os.umask(0o177)
    try:
        return await asyncio.start_unix_server(ranks.serve_local, near)
    except OSError as error:
        raise ConfigError(f"directory: cannot listen on {path}: {error.strerror or error}") from error
    finally:
        os.umask(mask)


async def _on_any_host(remote: tuple[str, int, str], ranks: RankServer, token: bytes) -> tuple[asyncio.Server, str]:
    """Listen on the one address that `remote` names; return the server and the host as ranks write it."""
    host, port, named_by = remote
    try:
        family, *_, address = await _resolve_host(host, port)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            return await asyncio.start_server(ranks.serve_with(token), sock=listener), _bracket_host(host)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{named_by}: cannot listen on {host}:{port}: {error.strerror or error}; it must be an address of the host "
            "on which the agent runs"
        ) from error


async def _resolve_host(host: str, port: int) -> tuple[int, int, int, str, tuple[object, ...]]:
    loop, until = asyncio.get_running_loop(), asyncio.get_running_loop().time() + RESOLVE_S
    while True:
        try:
            return (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        except socket.gaierror:
            if loop.time() >= until:
                raise
            await asyncio.sleep(AGAIN_S)


def _bracket_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# ---- rank server ----------------------------------------------------------------------------------------------------
# Serves the connections of ranks: passes each message of rank 0 to the core, and the core's answer back.


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

        Other ranks on other hosts send nothing: they hold the connection to notice the agent's end (rank/joining.py).
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
