"""The agent's sockets and what ranks hear on them: real connections to the real server, with the core of `Play`."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from dips.client.agent import agent
from dips.client.agent.agent import AgentSignals, CommandRunner, Connection, RankServer, listen_for_ranks
from dips.client.agent.state import Actions
from dips.client.ipc import messages
from dips.client.ipc.address import AGENT, GREETING, PROOF, TOKEN, OnAnyHost, TokenClient
from dips.client.ipc.messages import (
    AskAgain,
    Attached,
    Detach,
    ErrorReply,
    Noted,
    PullNow,
    PullWanted,
    TransferProgress,
)
from dips.client.rank import joining
from dips.config import ClusterFile, Shared
from dips.errors import Busy, ConfigError
from dips.ids import GENESIS
from dips.protocol.effects import Grant, Joined
from dips.protocol.enums import ClusterStanding
from dips.telemetry import logs
from dips.telemetry.refusals import refusals_by_reason
from tests.unit.client.agent.play import NONE_YET, Play, grant
from tests.waiting import eventually

SECRET = "0123456789abcdef"


class Served:
    """An agent's rank server in a directory; what it does with the core's actions is `Play`'s."""

    def __init__(self, directory: Path, hold_s: float, **keys: Any) -> None:
        self.play, self.signals, self.refuses = Play(), AgentSignals(), ""
        self.config = ClusterFile(
            shared=Shared(run="r"), cluster="c", master="127.0.0.1:1", directory=directory, tls=False, **keys
        )
        self.ranks = RankServer(
            self.play.core, hold_s, self.perform, self.signals, self.rewrite, structlog.get_logger()
        )

    def perform(self, actions: Actions) -> None:
        self.play.do(actions)
        if actions:
            self.signals.notify_change()

    def rewrite(self, granted: Grant) -> Grant:
        if self.refuses:
            raise Busy(self.refuses)
        return Grant(granted.version, granted.slaves, 7.0)

    def reply(self, result: Any) -> None:
        """The master answers the open question."""
        self.play.reply(result)
        self.signals.notify_change()


@asynccontextmanager
async def serve(directory: Path, hold_s: float = 60.0, **keys: Any) -> AsyncIterator[tuple[Served, dict[str, str]]]:
    served = Served(directory, hold_s, **keys)
    async with listen_for_ranks(served.config, served.ranks, structlog.get_logger()) as environment:
        yield served, environment


@asynccontextmanager
async def dial(environment: dict[str, str]) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_unix_connection(environment[AGENT].removeprefix("unix:"))
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


async def ask(rank: Connection, message: messages.Message) -> messages.Message:
    await rank.write_message(message)
    async with asyncio.timeout(20):
        return await rank.read_message()


async def attach(served: Served, rank: Connection) -> None:
    """Rank 0 attaches; the master's answer comes while its question is held."""
    await rank.write_message(served.play.attach())
    await eventually(lambda: served.play.asks)
    served.reply(Joined(3, 1, GENESIS, NONE_YET, ()))
    async with asyncio.timeout(20):
        assert await rank.read_message() == Attached(1, 0.0)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(20):
        return await reader.read(1) == b""


async def test_a_question_is_held_until_it_has_an_answer(tmp_path: Path) -> None:
    """No rank polls: the master's reply wakes it. A grant has the addresses that are right for these ranks."""
    async with serve(tmp_path) as (served, environment), dial(environment) as rank:
        await attach(served, rank)
        wanted = PullWanted(1, 1)
        await rank.write_message(wanted)
        await eventually(lambda: served.play.s.sync.waiting)
        served.reply(grant())
        async with asyncio.timeout(20):
            verdict = await rank.read_message()
        assert isinstance(verdict, PullNow) and verdict.grant.deadline_s == 7.0
        served.refuses = "the relay has no port left"
        assert await ask(rank, wanted) == ErrorReply("Busy", served.refuses)
        assert await ask(rank, TransferProgress(1, 5, 10)) == Noted() and not served.signals.detached.is_set()


@pytest.mark.parametrize(("hold_s", "at_once"), [(0.05, False), (60.0, True)])
async def test_a_question_without_an_answer_is_given_back(tmp_path: Path, hold_s: float, at_once: bool) -> None:
    """After the time for which one is held; at once if its ranks train meanwhile."""
    async with serve(tmp_path, hold_s) as (served, environment), dial(environment) as rank:
        if not at_once:
            began = asyncio.get_running_loop().time()
            assert isinstance(await ask(rank, served.play.attach()), AskAgain)
            assert asyncio.get_running_loop().time() - began >= hold_s
            return
        await attach(served, rank)
        assert isinstance(await ask(rank, PullWanted(1, 1, at_once=True)), AskAgain)


async def test_a_rank_0_that_hangs_up_has_ended_its_attempt(tmp_path: Path) -> None:
    """Unless it detached before: then its end is no failure. A notice has no answer."""
    async with serve(tmp_path) as (served, environment):
        async with dial(environment) as rank:
            await attach(served, rank)
            await rank.write_message(messages.Stepped(1, 10, None))
        await eventually(lambda: not served.play.s.trainer.alive)
        assert served.play.s.tally.cause == "failure" and served.play.s.trainer.inner_steps == 1
        assert not served.signals.detached.is_set()
        async with dial(environment) as rank:
            assert await ask(rank, served.play.attach(launch=2, pid=8)) == Attached(2, 0.0)
            assert await ask(rank, Detach(2)) == Noted()
            assert served.signals.detached.is_set()
            assert isinstance(await ask(rank, Detach(1)), ErrorReply), "of an older attempt"
        assert served.play.s.tally.cause == "ended"


async def test_a_rank_0_that_hangs_up_before_it_is_attached_has_ended_its_attempt(tmp_path: Path) -> None:
    """Where others start the ranks, nobody else says that they are dead: `dips status` would show a job that starts,
    until the next one. A connection of an older attempt ends no newer one."""
    async with serve(tmp_path, 0.02) as (served, environment):
        async with dial(environment) as older:
            assert isinstance(await ask(older, served.play.attach()), AskAgain), "the master has not answered"
            async with dial(environment) as rank:
                assert isinstance(await ask(rank, served.play.attach(launch=2, pid=8)), AskAgain)
                assert isinstance(await ask(older, served.play.attach()), ErrorReply)
                older.close()
                assert isinstance(await ask(rank, served.play.attach(launch=2, pid=8)), AskAgain)
                assert served.play.s.trainer.alive
        await eventually(lambda: not served.play.s.trainer.alive)


async def test_what_is_no_message_closes_the_connection(tmp_path: Path) -> None:
    """And is counted; its attempt is over, since nobody knows what its rank 0 would have said."""
    async with serve(tmp_path) as (served, environment):
        before = refusals_by_reason().get("agent_line_malformed", 0)
        reader, writer = await asyncio.open_unix_connection(environment[AGENT].removeprefix("unix:"))
        rank = Connection(reader, writer)
        await attach(served, rank)
        writer.write(messages.LENGTH.pack(4) + b"\xff\xff\xff\xff")
        assert await is_closed(reader) and not served.play.s.trainer.alive
        assert refusals_by_reason()["agent_line_malformed"] == before + 1
        rank.close()


async def test_connections_of_one_host_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one beyond is closed and counted; it has a place when another has ended."""
    monkeypatch.setattr(agent, "MOST_LOCAL", 1)
    async with serve(tmp_path, 0.0) as (served, environment):
        before = refusals_by_reason().get("agent_line_full", 0)
        async with dial(environment) as first:
            assert isinstance(await ask(first, served.play.attach()), AskAgain)
            reader, writer = await asyncio.open_unix_connection(environment[AGENT].removeprefix("unix:"))
            assert await is_closed(reader)
            writer.close()
            assert refusals_by_reason()["agent_line_full"] == before + 1
        await eventually(lambda: served.ranks._local == 0)
        async with dial(environment) as next_one:
            assert isinstance(await ask(next_one, served.play.attach()), AskAgain)


async def test_the_socket_is_this_users_alone_and_goes_with_the_agent(tmp_path: Path) -> None:
    """One that a killed agent left is replaced; files that are made afterwards have the modes that they had."""
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    given = os.umask(0o027)
    try:
        async with serve(tmp_path) as (_, environment):
            assert environment == {AGENT: f"unix:{path}"}
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            (tmp_path / "after").touch()
            assert stat.S_IMODE((tmp_path / "after").stat().st_mode) == 0o640
    finally:
        os.umask(given)
    assert not path.exists()


@asynccontextmanager
async def join(environment: dict[str, str], token: str) -> AsyncIterator[Connection]:
    """Dial as a rank of another host does, and prove a token."""
    host, _, port = environment[AGENT].removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        guest = TokenClient(token.encode(), await reader.readexactly(GREETING))
        writer.write(guest.answer)
        yield Connection(reader, writer, guest.accept_proof(await reader.readexactly(PROOF)))
    finally:
        writer.close()
        await writer.wait_closed()


async def test_ranks_of_other_hosts_prove_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the operator has set, or a new one in the environment of the command; bounded and counted apart."""
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(agent, "MOST_REMOTE", 1)
    async with serve(tmp_path, 0.0, agent="127.0.0.1:0") as (_, environment):
        assert len(environment[TOKEN]) == 64
    monkeypatch.setenv(TOKEN, SECRET)
    async with serve(tmp_path, 0.0, agent="127.0.0.1:0") as (served, environment):
        assert environment[TOKEN] == SECRET and not environment[AGENT].endswith(":0")
        refused, full = (refusals_by_reason().get(f"agent_line_{why}", 0) for why in ("refused", "full"))
        with pytest.raises(asyncio.IncompleteReadError):
            async with join(environment, "another token...."):
                pass
        await eventually(lambda: served.ranks._remote == 0)
        assert refusals_by_reason()["agent_line_refused"] == refused + 1
        async with join(environment, SECRET) as rank:
            assert isinstance(await ask(rank, served.play.attach()), AskAgain)
            with pytest.raises(asyncio.IncompleteReadError):
                async with join(environment, SECRET):
                    pass
            assert refusals_by_reason()["agent_line_full"] == full + 1
    with pytest.raises(ConnectionRefusedError):
        async with join(environment, SECRET):
            pass
    async with serve(tmp_path, agent=environment[AGENT].removeprefix("tcp://")) as (_, again):
        assert again == environment, "at once: connections that the agent before has closed are no hindrance"


async def test_strangers_fill_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection without the token wrote a line to the agent's log: whoever reached its port filled that disk."""
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setattr(logs, "SELDOM_S", 60.0)
    refused = refusals_by_reason().get("agent_line_refused", 0)
    with structlog.testing.capture_logs() as lines:
        async with serve(tmp_path, 0.0, agent="127.0.0.1:0") as (served, environment):
            for _ in range(10):
                with pytest.raises(asyncio.IncompleteReadError):
                    async with join(environment, "another token...."):
                        pass
            await eventually(lambda: served.ranks._remote == 0)
    assert refusals_by_reason()["agent_line_refused"] == refused + 10
    assert [line["event"] for line in lines].count("agent_line_refused") == 1


async def test_an_address_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is looked up for some time, since that of a pod is known only after its start."""
    monkeypatch.setattr(agent, "RESOLVE_S", 0.0)
    for address in ("192.0.2.1:7", "nowhere.invalid:7"):
        with pytest.raises(ConfigError, match=f"agent: cannot listen on {address}"):
            async with serve(tmp_path, agent=address):
                pass
        assert not (tmp_path / "agent.sock").exists()


async def test_a_port_that_is_taken_is_no_address_of_another_host(tmp_path: Path) -> None:
    """What to do about it is said: the address is right."""
    async with serve(tmp_path, agent="127.0.0.1:0") as (_, environment):
        taken = environment[AGENT].removeprefix("tcp://")
        (tmp_path / "other").mkdir()
        with pytest.raises(ConfigError, match=f"cannot listen on {taken}: Address already in use; .*another port$"):
            async with serve(tmp_path / "other", agent=taken):
                pass


async def test_an_agent_that_waits_for_its_name_ends_at_sigterm(tmp_path: Path) -> None:
    """A pod that is deleted before its name is known; the socket goes with the agent."""
    served = Served(tmp_path, 0.0, agent="nowhere.invalid:7")
    served.ranks.signals.terminated.set()
    async with asyncio.timeout(20):
        with pytest.raises(SystemExit, match="143"):
            async with listen_for_ranks(served.config, served.ranks, structlog.get_logger()):
                pass
    assert not (tmp_path / "agent.sock").exists()


class Stopped:
    """A trainer that others started, served until one of its events."""

    def __init__(self) -> None:
        self.play, self.signals = Play(), AgentSignals()
        self.play.begin()
        unused: Any = None
        self.runner = CommandRunner(self.play.core, unused, self.signals, structlog.get_logger(), start=unused)


@pytest.mark.parametrize("event", ["detached", "terminated"])
async def test_a_trainer_of_others_is_served_until_it_detaches(event: str) -> None:
    """Then the agent is done, too, as after SIGTERM; nothing waits for the other events."""
    stopped = Stopped()
    serving = asyncio.create_task(stopped.runner.serve_others())
    await asyncio.sleep(0)
    assert not serving.done()
    getattr(stopped.signals, event).set()
    async with asyncio.timeout(20):
        assert await serving == 0
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("hears", [True, False])
async def test_a_trainer_of_others_hears_why_its_agent_ends(hears: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fenced: the agent waits until rank 0 has had the reason and is gone, but not for ever."""
    monkeypatch.setattr(agent, "FAILURE_GRACE_S", 60.0 if hears else 0.0)
    stopped = Stopped()
    stopped.play.answer_heartbeat(ClusterStanding.FENCED)
    stopped.signals.stopped.set()
    serving = asyncio.create_task(stopped.runner.serve_others())
    done, _ = await asyncio.wait({serving}, timeout=0.05 if hears else 20)
    assert bool(done) is not hears
    stopped.play.do(stopped.play.core.on_trainer_gone("it has heard", 0.0))
    async with asyncio.timeout(20):
        assert await serving == 75


async def test_a_rank_that_is_done_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another host it watches its agent by a connection: one that it closed itself says nothing about the agent."""
    ended = list[str]()
    monkeypatch.setattr(joining, "_end_process", ended.append)
    monkeypatch.setenv(TOKEN, SECRET)
    async with serve(tmp_path, 0.0, agent="127.0.0.1:0") as (_, environment):
        host, _, port = environment[AGENT].removeprefix("tcp://").rpartition(":")
        address = OnAnyHost(host, int(port), SECRET.encode(), "the test")
        stop = await asyncio.to_thread(joining.watch_agent, address, 1.0)
        (watching,) = (thread for thread in threading.enumerate() if thread.name == "agent-watch")
        stop()
        await asyncio.to_thread(watching.join, 20)
        assert not watching.is_alive() and ended == []
