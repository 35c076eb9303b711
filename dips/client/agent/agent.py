"""The agent's daemon around its core: runs the training command, calls the master, and answers the ranks."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, cast

from grpc import aio

from dips.client.agent.account import NO_INCARNATION, PastIncarnation
from dips.client.agent.core import AgentCore
from dips.client.agent.restarts import EndAgent, LaunchCommand
from dips.client.agent.state import Actions, AskMaster, Channel, RecordMark, SaveIncarnation, SendHeartbeat, StopTrainer
from dips.client.agent.trainer import CommandLaunch
from dips.client.ipc import messages
from dips.client.ipc.address import (
    AGAIN_S,
    AGENT,
    ANSWER,
    RESOLVE_S,
    TAG,
    TOKEN,
    Seal,
    TokenServer,
    keep_alive,
    over_network,
    reach_socket,
    socket_path,
    token_of,
)
from dips.client.ipc.messages import Answer, AskAgain, Attach, Detach, ErrorReply, Message, Noted, PullNow, PushNow
from dips.config import ClusterFile
from dips.dataclass import replace
from dips.differences import differing_options
from dips.errors import (
    Busy,
    ConfigError,
    Denied,
    DifferentModel,
    DipsError,
    RemoteProtocolError,
    Unavailable,
    UnavailableMaster,
)
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
from dips.tasks import Alarm, call_apart, start_task
from dips.telemetry.logs import Log, SeldomWarnings
from dips.telemetry.refusals import count_refusal
from dips.telemetry.timeline import Timeline
from dips.transport import control
from dips.transport.endpoints import Endpoint
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceStub
from dips.wire.generated.status_pb2 import DescribeRequest
from dips.wire.generated.status_pb2_grpc import StatusServiceStub
from dips.wire.messages import from_proto, to_proto, unwrap_oneof

# ---- signals --------------------------------------------------------------------------------------------------------


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


def _now() -> float:
    """Return the present time of the running loop, which is monotonic seconds."""
    return asyncio.get_running_loop().time()


# ---- connection -----------------------------------------------------------------------------------------------------


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


OWN_ADDRESS = "it must be an address of the host on which the agent runs"


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
    """Listen on the Unix socket for rank 0, which only this user can open. The kernel is given `near` for `path`.

    asyncio replaces a socket left by an agent that was killed; the pid file's lock shows that none runs.
    """
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
        family, *_, address = await _resolve_host(host, port, ranks.signals)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            return await asyncio.start_server(ranks.serve_with(token), sock=listener), _bracket_host(host)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        advice = "the agent of another cluster has it? Take another port" if taken else OWN_ADDRESS
        raise ConfigError(f"{named_by}: cannot listen on {host}:{port}: {error.strerror or error}; {advice}") from error


async def _resolve_host(host: str, port: int, signals: AgentSignals) -> tuple[int, int, int, str, tuple[object, ...]]:
    """Look up a name until it is known. Raises gaierror after RESOLVE_S, SystemExit if SIGTERM arrives meanwhile."""
    loop, until = asyncio.get_running_loop(), asyncio.get_running_loop().time() + RESOLVE_S
    while True:
        try:
            return (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        except socket.gaierror:
            if loop.time() >= until:
                raise
            if await signals.wait_terminated(AGAIN_S):
                raise SystemExit(128 + signal.SIGTERM) from None


def _bracket_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# ---- rank server ----------------------------------------------------------------------------------------------------


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
        self.signals, self._rewrite, self._log = signals, rewrite, log
        self._refusals = SeldomWarnings(log)
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
        self._refusals.warning(why, **fields)
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
                trainer = self._core.state.trainer
                if isinstance(message, Attach) and message.process == trainer.process:  # attached, or about to be
                    attempt = trainer.attempt
                if answer is not None:
                    await rank.write_message(answer)
                if isinstance(message, Detach) and isinstance(answer, Noted):
                    attempt = 0
                    self.signals.detached.set()
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
                self._perform(self._core.on_hang_up(attempt, _now()))
            rank.close()

    async def _await_answer(self, message: Message) -> Answer | None:
        """Ask the core again after each change, until it has an answer or `hold_s` has passed."""
        until = _now() + self._hold_s
        while True:
            change = self.signals.next_change()
            answer, actions = self._core.on_message(message, _now())
            self._perform(actions)
            left_s = until - _now()
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


# ---- incarnation file -----------------------------------------------------------------------------------------------
# The file that an agent leaves in its directory for the next one: its incarnation and the tokens that it consumed.
#
# Heartbeats report both to the master, which keeps them in memory; if both processes die, the next agent here still
# knows the tokens and reports them as lost. The file is written aside and renamed, before each heartbeat and before a
# push can be settled (actions.SAVED_AT). It is not fsynced: it must survive the process, not the machine. A disk that
# says nothing is waited for once, for SAVE_S; heartbeats go on, and the newest is saved as soon as it answers.


FILE = "incarnation.json"
SAVE_S = 1.0


class IncarnationFile:
    """The incarnation file of one directory; the holder of `agent.pid` owns it."""

    def __init__(self, directory: Path, run: str, cluster: str, log: Log) -> None:
        self._path, self._whose, self._log = directory / FILE, {"run": run, "cluster": cluster}, log
        self._saved: PastIncarnation | None = None
        self._wanted: PastIncarnation | None = None
        self._lock, self._writes, self._fails = threading.Lock(), False, False

    def read_former(self) -> PastIncarnation:
        """Return what the last agent here saved; NO_INCARNATION if there is none, or if it is another run's or
        cluster's.
        """
        try:
            found = json.loads(self._path.read_text())
            past = PastIncarnation(int(found["inc"]), int(found["tokens_consumed"]))
            return past if {name: found[name] for name in self._whose} == self._whose else NO_INCARNATION
        except FileNotFoundError:
            return NO_INCARNATION
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            done = "tokens that the last agent here did not report stay unreported"
            self._log.warning("incarnation_not_read", path=str(self._path), error=str(error), done=done)
            return NO_INCARNATION

    def save_incarnation(self, past: PastIncarnation) -> None:
        """Save an incarnation; a disk that fails, or says nothing, is logged and does not stop training."""
        with self._lock:
            self._wanted = past
            if past == self._saved or self._writes:  # the thread that waits for the disk takes the newest
                return
            self._writes = True
        try:
            call_apart(self._write_newest, "incarnation").result(SAVE_S)
        except TimeoutError:
            self._tell_failure(f"the disk has not answered for {SAVE_S:g} s")

    def _write_newest(self) -> None:
        """Write until the newest is saved or the disk fails; runs in a thread of its own."""
        while True:
            with self._lock:
                past = self._wanted
                if past is None or past == self._saved:
                    self._writes = False
                    return
            try:
                self._write_file(past)
            except OSError as error:
                self._tell_failure(str(error))
                with self._lock:
                    self._writes = False
                return
            with self._lock:
                self._saved, self._fails = past, False

    def _write_file(self, past: PastIncarnation) -> None:
        aside = self._path.with_suffix(".new")
        aside.write_text(json.dumps({**self._whose, "inc": past.inc, "tokens_consumed": past.consumed}))
        aside.replace(self._path)

    def _tell_failure(self, why: str) -> None:
        if not self._fails:
            self._log.warning("incarnation_not_written", path=str(self._path), error=why)
        self._fails = True


# ---- master link ----------------------------------------------------------------------------------------------------
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


FAILURE_GRACE_S = 10.0  # for a trainer to report why it cannot continue, before it is stopped
BEFORE_GRACE_S = 10.0  # between SIGTERM and SIGKILL of `before_start`, which has no checkpoint to save
LATE = 124  # exit code of a `before_start` that took too long, as timeout(1) has it


# Between SIGTERM and SIGKILL of the trainer: time to save a checkpoint of a large model. Launchers may allow less:
# Kubernetes and Slurm 30 s by default to the agent, torchrun 30 s to its ranks, or --shutdown-timeout.
END_GRACE_S = 300.0


class Launch(Protocol):
    """One launch of the training command: `CommandLaunch`, or a simulated one."""

    pid: int

    async def wait(self) -> int: ...
    async def end_within(self, grace_s: float) -> int: ...
    def last_lines(self, most: int) -> tuple[str, ...]: ...
    async def kill_leftovers(self, give_up: Callable[[Sequence[int]], bool]) -> int: ...
    async def find_cause(self) -> str: ...


StartLaunch = Callable[[Sequence[str], Mapping[str, str]], Awaitable[Launch]]  # of a command and its environment


class CommandRunner:
    """Runs one training command, or serves a trainer that others start."""

    def __init__(
        self,
        core: AgentCore,
        perform: Callable[[Actions], None],
        signals: AgentSignals,
        log: Log,
        end_grace_s: float = END_GRACE_S,
        start: StartLaunch = CommandLaunch.start,
    ) -> None:
        """Create a runner; `end_grace_s` is the time between SIGTERM and SIGKILL of the trainer."""
        self._core, self._perform, self._signals, self._log = core, perform, signals, log
        self._end_grace_s, self._start = end_grace_s, start
        self._launch: Launch | None = None  # the newest; None: there was none, or it is being started
        self._lines_before: tuple[str, ...] = ()  # last lines of the launch before

    async def run(self, command: Sequence[str], environment: dict[str, str]) -> int:
        """Launch the command until it ends by itself, is stopped, or has crashed too often; return the exit code."""
        plan: LaunchCommand | EndAgent = self._core.plan_first_launch()
        while isinstance(plan, LaunchCommand):
            code, last_line = await self._launch_once(plan.launch, command, environment)
            plan = self._core.plan_next_launch(plan, code, self._signals.terminated.is_set(), last_line)
            if isinstance(plan, LaunchCommand) and await self._signals.wait_terminated(plan.delay_s):
                return code
        self._perform(self._core.tick(_now()))  # what was remarked at the end
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
        until = _now() + FAILURE_GRACE_S
        while self._core.state.trainer.alive and _now() < until:  # the trainer gets the reason as an answer
            await asyncio.sleep(0.1)
        return stop.code

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines on the training command's standard error; those of the former launch if this one
        printed none.
        """
        lines = () if self._launch is None else self._launch.last_lines(MOST_LINES)
        return lines or self._lines_before

    async def _launch_once(self, launch: int, command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
        """Launch the command and wait for its end; return its exit code and its last line on standard error, or those
        of a `before_start` that failed.
        """
        environment = {**environment, "DIPS_ATTEMPT": str(launch)}
        if self._core.state.settings.before_start:
            code, cause = await self._run_before(launch, environment)
            if code or self._signals.terminated.is_set() or self._signals.stopped.is_set():
                return code, f"before_start: {cause or 'it printed nothing'}"
        process = await self._begin_launch(command, environment)
        self._perform([RecordMark("trainer_start", {"attempt": launch, "pid": process.pid})])
        code = await self._wait_or_end(process, self._end_grace_s)
        left = await process.kill_leftovers(self._give_up_leftovers)
        self._perform(self._core.on_trainer_gone(f"the trainer ended with exit code {code}", _now()))
        self._perform([RecordMark("trainer_end", {"attempt": launch, "code": code, "killed": left})])
        return code, await process.find_cause()

    async def _begin_launch(self, command: Sequence[str], environment: Mapping[str, str]) -> Launch:
        self._lines_before, self._launch = self.last_lines(), None
        self._launch = await self._start(command, environment)
        return self._launch

    async def _run_before(self, launch: int, environment: Mapping[str, str]) -> tuple[int, str]:
        """Run `before_start` to its end; return its exit code and why it failed."""
        settings, begun = self._core.state.settings, _now()
        process = await self._begin_launch(settings.before_start, environment)
        self._perform([RecordMark("before_start", {"attempt": launch, "pid": process.pid})])
        try:
            async with asyncio.timeout(settings.before_start_s):
                code, late = await self._wait_or_end(process, BEFORE_GRACE_S), ""
        except TimeoutError:
            await process.end_within(BEFORE_GRACE_S)
            code, late = LATE, f"not done after {settings.before_start_s:g} s (collective_s)"
        left = await process.kill_leftovers(self._give_up_leftovers)
        ended = {"attempt": launch, "code": code, "killed": left, "seconds": round(_now() - begun, 3)}
        self._perform([RecordMark("before_start_end", ended)])
        return code, "; ".join(filter(None, (late, await process.find_cause())))

    def _give_up_leftovers(self, left: Sequence[int]) -> bool:
        """Warn of processes that SIGKILL does not end; return whether the agent ends without them."""
        why = "a device or a file system hangs, or they are another user's? Until they are gone the training command "
        why += "is not started"
        self._log.warning("processes of the trainer do not end", pids=list(left), why=why)
        return self._signals.terminated.is_set() or self._signals.stopped.is_set()

    async def _wait_or_end(self, process: Launch, grace_s: float) -> int:
        """Wait for the process to end; stop it if SIGTERM arrived or the core ordered it. Return its exit code."""
        ended = asyncio.create_task(process.wait())
        must_end = [asyncio.create_task(e.wait()) for e in (self._signals.terminated, self._signals.stopped)]
        try:
            await asyncio.wait({ended, *must_end}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and self._signals.stopped.is_set():  # the trainer gets and reports the reason
                await asyncio.wait({ended}, timeout=FAILURE_GRACE_S)
            return ended.result() if ended.done() else await process.end_within(grace_s)
        finally:
            for task in (ended, *must_end):
                task.cancel()


# ---- agent ----------------------------------------------------------------------------------------------------------
# All decisions are in core.py. One event loop owns the core; every task calls it and performs what it returns, so no
# lock is needed. Sockets and channels are made in app.py.


# Marks that every successful outer step writes; logged at level debug.
ROUTINE = frozenset({"push_begin", "push_end", "window_begin", "window_end", "pull_begin", "pull_end"})
LEAVE_S = 3.0  # for telling a master, which may be down, that this cluster leaves


def mark_level(kind: str, fields: Mapping[str, object]) -> str:
    """Return the log level of a mark: debug if it is routine and succeeded, warning for remarks, else info; "" for
    inner steps and those of a pipeline, which are not logged.
    """
    if kind in ("inner", "pipeline"):
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
        hold_s: float,
        core: AgentCore,
        master: MasterPort,
        timeline: Timeline,
        log: Log,
        rewrite: Callable[[Grant], Grant] = lambda grant: grant,
        save: Callable[[PastIncarnation], None] = lambda past: None,
        find_problem: Callable[[], str] = lambda: "",
        start: StartLaunch = CommandLaunch.start,
    ) -> None:
        """Wire the core to the master, the timeline and the training command.

        hold_s        how long a rank's question is held open for an answer, at most
        rewrite       turns the master's grant into the one the ranks get: a relay puts its own addresses in
        save          saves what the next agent needs if this one dies
        find_problem  returns why renewed certificates are not used, "" if they are
        start         starts the training command
        """
        self._core, self._master, self._save, self._find_problem = core, master, save, find_problem
        self._timeline, self._log = timeline, log
        self._signals = AgentSignals()
        self._tasks = set[asyncio.Task[None]]()
        self._asking: dict[Channel, asyncio.Task[None]] = {}
        self._alarm = Alarm()  # of `_keep_time`
        self._command = CommandRunner(core, self.perform_actions, self._signals, log, start=start)
        self.ranks = RankServer(core, hold_s, self.perform_actions, self._signals, rewrite, log)

    def terminate(self) -> None:
        """Handle SIGTERM: stop the trainer, leave the run, return from `run`."""
        self._signals.terminated.set()

    def next_change(self) -> asyncio.Event:
        """Return an event that is set when the core's state has changed."""
        return self._signals.next_change()

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
            actions = self._core.on_error(ask, error, _now())
        else:
            actions = self._core.on_reply(ask, result, _now())
        self._end_call(actions)

    async def _carry_heartbeat(self, action: SendHeartbeat) -> None:
        heartbeat = replace(action.heartbeat, lines=self._command.last_lines())
        try:
            answer = await self._master.send_heartbeat(heartbeat, action.deadline_s)
        except DipsError as error:
            self._log.warning("a heartbeat was not answered", error=str(error))
            actions = self._core.on_heartbeat_error(error, _now())
        else:
            actions = self._core.on_heartbeat_reply(action.heartbeat.inc, answer, _now())
        self._end_call(actions)

    def _end_call(self, actions: Actions) -> None:
        """Perform what a call to the master has led to; without actions, too, answers and the next deadline may have
        changed.
        """
        self.perform_actions(actions)
        self._alarm.ring()
        self._signals.notify_change()

    async def _keep_time(self) -> None:
        """Call the core whenever one of its deadlines is due."""
        while True:
            self.perform_actions(self._core.on_certificate(self._find_problem()))
            self.perform_actions(self._core.tick(_now()))
            await self._alarm.wait(max(0.0, self._core.next_deadline() - _now()))

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
