"""The connection between hosts: only a peer with the token is admitted, and no message can be altered on the way."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dips.client.agent.agent import Connection
from dips.client.ipc import messages
from dips.client.ipc.address import (
    AGENT_HOME,
    ANSWER,
    GREETING,
    MOST_PATH,
    PROOF,
    TAG,
    Address,
    OnAnyHost,
    OnThisHost,
    Seal,
    TokenClient,
    TokenServer,
    find_address,
    over_network,
    reach_socket,
    token_of,
)
from dips.client.ipc.messages import Noted, Stepped, TransferProgress
from dips.client.rank import agent_client, joining
from dips.client.rank.agent_client import FLUSH_S, AgentClient, AgentConnection, JobCollectives, _open_socket
from dips.config import ClusterFile, Shared
from dips.errors import ConfigError, Denied, LocalProtocolError, RemoteProtocolError, Unavailable
from tests.open_files import nothing_left_open

TOKEN = b"0123456789abcdef"


def cluster(**keys: object) -> ClusterFile:
    return ClusterFile(
        shared=Shared(run="r"), cluster="c", master="127.0.0.1:1", directory=Path("/d"), tls=False, **keys
    )


@pytest.mark.parametrize(
    ("agent", "environment", "expected"),
    [
        (None, {}, "unix:/d/agent.sock from directory"),
        (None, {"DIPS_AGENT": "unix:/x.sock"}, "unix:/x.sock from DIPS_AGENT"),
        ("head:7", {}, "tcp://head:7 from agent"),
        ("head:7", {"DIPS_AGENT": "unix:/x.sock"}, "unix:/x.sock from DIPS_AGENT"),
        ("head:7", {"DIPS_AGENT": "tcp://other:8"}, "tcp://other:8 from DIPS_AGENT"),
        ("$MASTER_ADDR:7", {"MASTER_ADDR": "n0"}, "tcp://n0:7 from agent"),
        ("${MASTER_ADDR}:7", {"MASTER_ADDR": "fd00::1"}, "tcp://[fd00::1]:7 from agent"),
    ],
)
def test_where_a_rank_looks(agent: str | None, environment: dict[str, str], expected: str) -> None:
    """The variable comes before the file, and the file before the socket beside it."""
    found = find_address(cluster(agent=agent), {"DIPS_AGENT_TOKEN": TOKEN.decode(), **environment})
    assert f"{found} from {found.named_by}" == expected
    assert TOKEN.decode() not in repr(found)


@pytest.mark.parametrize(
    ("keys", "environment", "message"),
    [
        ({}, {"DIPS_AGENT": "head:7"}, "DIPS_AGENT: expected tcp://HOST:PORT"),
        ({}, {"DIPS_AGENT": "tcp://head"}, "DIPS_AGENT: expected an address"),
        ({"agent": "$MASTER_ADDR:7"}, {}, "MASTER_ADDR, which is not set"),
        ({"agent": "head:7"}, {}, "need the job's token: set DIPS_AGENT_TOKEN"),
        ({"agent": "head:7"}, {"DIPS_AGENT_TOKEN": "short"}, "at least 16 characters, got 5"),
        ({"agent": "head:7", "token": Path("/nowhere")}, {}, "token: /nowhere: cannot be read"),
    ],
)
def test_what_names_no_agent(keys: dict[str, object], environment: dict[str, str], message: str) -> None:
    """The message says which key or variable is wrong."""
    with pytest.raises(ConfigError, match=message):
        find_address(cluster(**keys), environment)


@pytest.mark.parametrize("length", [10, 2 * MOST_PATH])
def test_a_socket_may_have_a_long_path(tmp_path: Path, length: int) -> None:
    """The kernel takes 107 bytes of a path; a longer one is reached through its open directory."""
    path = tmp_path / ("d" * length) / "agent.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        with reach_socket(path) as near:
            agent.bind(near)
        agent.listen()
        with _open_socket(OnThisHost(path, "directory")) as rank:
            accepted, _ = agent.accept()
            rank.sendall(b"step")
            assert path.is_socket() and accepted.recv(4) == b"step"
            accepted.close()


@pytest.mark.parametrize(("length", "by_itself"), [(MOST_PATH, True), (MOST_PATH + 1, False)])
def test_a_path_that_the_kernel_takes_is_given_to_it(tmp_path: Path, length: int, by_itself: bool) -> None:
    """A directory is held open only where it is needed, and while it is."""
    path = tmp_path / ("d" * (length - len(f"{tmp_path}//s"))) / "s"
    path.parent.mkdir()
    with nothing_left_open(), reach_socket(path) as near:
        assert len(str(path)) == length and (near == str(path)) is by_itself


def test_the_token_may_be_a_file(tmp_path: Path) -> None:
    """As Kubernetes mounts a secret; the newline of an editor does not count. A token in the environment goes first."""
    (tmp_path / "token").write_text(TOKEN.decode() + "\n")
    (tmp_path / "token").chmod(0o640)  # of the group, as a Secret is
    found = find_address(cluster(agent="head:7", token=tmp_path / "token"), {})
    assert isinstance(found, OnAnyHost) and found.token == TOKEN
    other = "f" * 16
    for told in (other, f"{other}\n"):  # as a Secret of Kubernetes that was made of a file, where other hosts mount it
        assert token_of(cluster(token=tmp_path / "token"), {"DIPS_AGENT_TOKEN": told}) == other.encode()
    assert over_network(cluster(), {}) is None


def introduced() -> tuple[Seal, Seal]:
    host = TokenServer(TOKEN)
    guest = TokenClient(TOKEN, host.greeting)
    proof, ours = host.admit_rank(guest.answer)
    assert (len(host.greeting), len(guest.answer), len(proof)) == (GREETING, ANSWER, PROOF)
    return ours, guest.accept_proof(proof)


@pytest.mark.parametrize("harm", ["altered", "repeated", "left out", "turned round"])
def test_a_message_that_was_tampered_with_is_refused(harm: str) -> None:
    """The tag is over the bytes, their number and their direction."""
    agent, rank = introduced()
    first, second = rank.tag_frame(b"first"), rank.tag_frame(b"second")
    assert len(first) == TAG
    if harm == "repeated":
        agent.check_frame(b"first", first)
    reader, words, tag = {
        "altered": (agent, b"fisrt", first),
        "repeated": (agent, b"first", first),
        "left out": (agent, b"second", second),
        "turned round": (rank, b"first", first),
    }[harm]
    with pytest.raises(RemoteProtocolError, match="wrong tag"):
        reader.check_frame(words, tag)


def test_neither_end_believes_the_other_without_the_token() -> None:
    """A stranger who dials and a stranger who answers learn nothing that another handshake would take."""
    host = TokenServer(TOKEN)
    with pytest.raises(Denied, match="dialled"):
        host.admit_rank(TokenClient(b"another token....", host.greeting).answer)
    guest = TokenClient(TOKEN, host.greeting)
    with pytest.raises(Denied, match="not this job's agent"):
        guest.accept_proof(bytes(PROOF))
    with pytest.raises(Denied):
        TokenServer(TOKEN).admit_rank(guest.answer)  # replayed to another connection
    with pytest.raises(RemoteProtocolError, match="greeting"):
        TokenClient(TOKEN, b"HTTP/1.1 400 Bad Request" + bytes(GREETING))


class AgentThread:
    """Answers Moving with Noted, in a thread with a loop of its own."""

    def __init__(self) -> None:
        self.received: list[messages.Message] = []
        self.writers: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            rank = await Connection.admit_rank(reader, writer, TOKEN)
            while True:
                self.received.append(message := await rank.read_message())
                if isinstance(message, TransferProgress):
                    await rank.write_message(Noted())
        except (Denied, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def close(self) -> None:
        if self._loop.is_closed():
            return

        async def end() -> None:
            self._server.close()
            for writer in self.writers:
                writer.close()
            serving = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*serving)
            await asyncio.sleep(0.05)  # transports close one turn later

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(name="agent")
def made_agent() -> Iterator[AgentThread]:
    agent = AgentThread()
    yield agent
    agent.close()


def at(port: int, token: bytes = TOKEN) -> OnAnyHost:
    return OnAnyHost("127.0.0.1", port, token, "DIPS_AGENT")


def test_questions_and_notices_over_tcp(agent: AgentThread) -> None:
    """As over the Unix socket."""
    connection = AgentConnection(at(agent.port), 2.0)
    connection.send_message(Stepped(1, 10, None))
    connection.send_message(TransferProgress(1, 2, 3))
    assert connection.receive_answer("TransferProgress") == Noted()
    assert agent.received == [Stepped(1, 10, None), TransferProgress(1, 2, 3)]
    connection.close()


def test_both_ends_of_a_connection_are_kept_alive(agent: AgentThread) -> None:
    """A host that is gone is noticed within half a minute, also by an end that only listens."""
    connection = AgentConnection(at(agent.port), 2.0)
    connection.send_message(TransferProgress(1, 2, 3))
    connection.receive_answer("TransferProgress")
    for end in (connection._socket, agent.writers[0].get_extra_info("socket")):
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    connection.close()


def test_the_steps_of_a_script_that_pauses_are_sent_without_a_further_one(agent: AgentThread) -> None:
    """An evaluation, a checkpoint: without a further step or question the agent would not know of the last steps."""
    client, step = AgentClient(JobCollectives(), at(agent.port), 2.0), Stepped(1, 10, 2.0)
    assert client.ask_agent(TransferProgress(1, 0, 1)) == Noted()
    for _ in range(3):  # the first is sent at once, the others are held
        client.report_step(step, time.monotonic())
    end = time.monotonic() + 10
    while sum(said.tokens for said in agent.received if isinstance(said, Stepped)) < 30:
        assert time.monotonic() < end, agent.received
        time.sleep(0.01)
    while client._holding.is_set():  # its thread sleeps again: nothing is held
        assert time.monotonic() < end
        time.sleep(0.01)
    client.disconnect()
    assert client._flusher is not None
    client._flusher.join(10)
    assert not client._flusher.is_alive(), "a process may make one loop after another"


def test_a_slow_step_goes_out_without_those_before_it(agent: AgentThread) -> None:
    """What the steps before it took would be taken for its time."""
    client = AgentClient(JobCollectives(), at(agent.port), 2.0)
    assert client.ask_agent(TransferProgress(1, 0, 1)) == Noted()
    for ended_s in (1.0, 1.01, 1.01 + 2 * FLUSH_S):
        client.report_step(Stepped(1, 10, None), ended_s)
    assert client.ask_agent(TransferProgress(1, 1, 1)) == Noted()
    assert [message.steps for message in agent.received if isinstance(message, Stepped)] == [1, 1, 1]
    client.disconnect()


@contextmanager
def scripted_peer(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yield the port of a peer that does this with its one connection, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(10)
                serve(peer)

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def greet(peer: socket.socket) -> Seal:
    host = TokenServer(TOKEN)
    peer.sendall(host.greeting)
    proof, seal = host.admit_rank(peer.recv(ANSWER, socket.MSG_WAITALL))
    peer.sendall(proof)
    return seal


def test_an_answer_that_was_altered_on_the_way_is_refused() -> None:
    """It would install a version that nobody granted."""

    def answer(peer: socket.socket) -> None:
        frame, tag = (
            messages.encode_message(Noted()),
            bytearray(greet(peer).tag_frame(messages.encode_message(Noted()))),
        )
        tag[0] ^= 1
        peer.sendall(frame + tag)

    with scripted_peer(answer) as port:
        connection = AgentConnection(at(port), 2.0)
        with pytest.raises(RemoteProtocolError, match="wrong tag"):
            connection.receive_answer("Attach")
        connection.close()


@pytest.mark.parametrize(
    ("greeting", "error", "why"),
    [
        (b"", Unavailable, "sent no greeting: timed out"),
        (b"HTTP/1.1 400 Bad Request".ljust(GREETING), RemoteProtocolError, "expected a greeting"),
    ],
    ids=["silence", "another protocol"],
)
def test_who_answers_and_is_no_agent_is_hung_up_on(
    greeting: bytes, error: type[Exception], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank tries again for a minute: connections that it leaves open would fill the other's table."""
    monkeypatch.setattr(agent_client, "CONNECT_S", 0.1 if not greeting else 10.0)
    heard: list[bytes] = []

    def serve(peer: socket.socket) -> None:
        peer.sendall(greeting)
        heard.append(peer.recv(1))

    with scripted_peer(serve) as port, pytest.raises(error, match=why) as raised:
        AgentConnection(at(port), 2.0)
    assert raised and heard == [b""]


def test_an_agent_may_think_for_as_long_as_a_poll_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than connecting takes; one that needs longer than that hangs."""
    monkeypatch.setattr(agent_client, "CONNECT_S", 1.0)
    monkeypatch.setattr(agent_client, "GRACE_S", 0.1)
    answered = threading.Event()

    def serve(peer: socket.socket) -> None:
        seal, frame = greet(peer), messages.encode_message(Noted())
        answered.wait(1.5)
        peer.sendall(frame + seal.tag_frame(frame))
        peer.recv(1)

    with scripted_peer(serve) as port:
        connection = AgentConnection(at(port), 10.0)
        assert connection.receive_answer("PushWanted") == Noted()
        connection.close()
    with scripted_peer(serve) as port:
        connection = AgentConnection(at(port), 0.0)
        with pytest.raises(Unavailable, match="does not answer: timed out"):
            connection.receive_answer("PushWanted")
        answered.set()
        connection.close()


def test_a_late_answer_is_not_taken_for_that_to_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent hung while ranks moved a push: that transfer fails, and the next question says that it is silent."""
    monkeypatch.setattr(agent_client, "GRACE_S", 0.1)
    failed, asked = threading.Event(), threading.Event()

    def serve(peer: socket.socket) -> None:
        seal = greet(peer)
        failed.wait(10)
        for answer in (Noted(), Noted()):
            frame = messages.encode_message(answer)
            with suppress(ConnectionError):
                peer.sendall(frame + seal.tag_frame(frame))
        asked.wait(10)

    with scripted_peer(serve) as port:
        client = AgentClient(JobCollectives(), at(port), 0.0)
        client._connection = AgentConnection(at(port), 0.0)
        assert "does not answer: timed out" in client.report_progress(1, 2, 3, 0.0)
        failed.set()
        with pytest.raises(Unavailable, match="does not answer: timed out"):
            client.ask_agent(messages.PushMoved(1, 1, 1, False, "", 0))
        asked.set()
        client.disconnect()


def test_an_agent_that_accepts_nobody_is_waited_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs: the kernel has no room for another connection, and would wait for it for ever."""
    monkeypatch.setattr(agent_client, "CONNECT_S", 0.1)
    path = OnThisHost(tmp_path / "agent.sock", "directory")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(path.path))
        agent.listen(0)
        first = AgentConnection(path, 2.0)
        with pytest.raises(Unavailable, match=r"no agent answers: tried unix:.*agent\.sock .*unavailable"):
            AgentConnection(path, 2.0)
        first.close()


def test_an_agent_that_is_not_there_yet_is_tried_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every rank of every host: not all the time."""
    monkeypatch.setattr(agent_client, "RETRY_S", 0.05)
    tried: list[Address] = []

    class Absent(AgentConnection):
        def __init__(self, address: Address, poll_s: float) -> None:
            tried.append(address)
            raise Unavailable("nobody is there")

    with pytest.raises(Unavailable, match=r"nobody is there \(tried for 0\.2 s\)"):
        Absent.connect_within(at(1), 2.0, 0.2)
    assert 2 <= len(tried) <= 5


def test_a_rank_with_another_token_is_refused_at_once(agent: AgentThread) -> None:
    """Waiting would not help it."""
    with pytest.raises(Denied, match=r"tcp://127.0.0.1:.*same token"):
        AgentConnection.connect_within(at(agent.port, b"another token...."), 2.0, 60.0)
    assert agent.received == []


def test_an_error_names_what_was_tried(tmp_path: Path) -> None:
    """Address, who named it, what the kernel said, how long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"tcp://127.0.0.1:{port} \(from DIPS_AGENT\): .*refused.*\(tried for 0"):
            AgentConnection.connect_within(at(port), 2.0, 0.1)
    with pytest.raises(Unavailable, match=r"unix:.*absent \(from socket\): No such file"):
        AgentConnection(OnThisHost(tmp_path / "absent", "socket"), 2.0)


def test_a_silent_connection_ends_with_the_agent_or_when_it_is_closed(
    agent: AgentThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is how a rank of another host sees that its agent is gone; no timeout of answers ends it before."""
    monkeypatch.setattr(agent_client, "GRACE_S", -1.9)
    connections = [AgentConnection(at(agent.port), 2.0) for _ in range(2)]
    ended = [threading.Event(), threading.Event()]
    threads = [
        threading.Thread(target=lambda k=k: (connections[k].wait_until_closed(), ended[k].set())) for k in range(2)
    ]
    for thread in threads:
        thread.start()
    assert not ended[0].wait(0.3)
    connections[0].close()
    assert ended[0].wait(10) and not ended[1].is_set()
    agent.close()
    assert ended[1].wait(10)
    connections[1].close()
    for thread in threads:
        thread.join()


def test_a_rank_of_another_host_ends_with_its_agent(agent: AgentThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends, which it did not close itself."""
    told, ended = list[str](), threading.Event()
    monkeypatch.delenv(AGENT_HOME, raising=False)
    monkeypatch.setattr(joining, "_end_process", lambda which: (told.append(which), ended.set()))
    stop = joining.watch_agent(at(agent.port), 2.0)
    agent.close()
    assert ended.wait(10) and told == [f"at tcp://127.0.0.1:{agent.port}"]
    stop()


class SecondOfTwo(JobCollectives):
    """The second rank of a job of two, whose first one contributes what the test says."""

    def __init__(self, others: bytes) -> None:
        super().__init__(7.0)
        self.rank, self.world_size, self._others = 1, 2, others
        self._group = object()  # type: ignore[assignment]

    def all_sum(self, numbers: Sequence[int]) -> list[int]:
        return [sum(pair) for pair in zip(numbers, (len(self._others), 0), strict=True)]


@pytest.mark.parametrize(("theirs", "ours"), [(b"abc", b"hello"), (b"hello", b"abc"), (b"", b"x"), (b"", b"")])
def test_messages_of_any_length_are_gathered(theirs: bytes, ours: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each padded to the longest, and cut again."""

    def gather(gathered: list[torch.Tensor], padded: torch.Tensor, group: object) -> None:
        gathered[0][: len(theirs)] = torch.tensor(list(theirs), dtype=torch.uint8)
        gathered[1].copy_(padded)

    monkeypatch.setattr(dist, "all_gather", gather)
    assert SecondOfTwo(theirs).all_gather(ours) == [theirs, ours]


def test_numbers_and_messages_lie_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch.set_default_device an OuterLoop of several ranks ended with a TypeError about numpy."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: tensor.mul_(2))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, *_, **__: None)
    ranks = SecondOfTwo(b"")
    with torch.device("meta"):
        assert ranks.broadcast(b"abc") == b"abc" and ranks.all_min([1, 2]) == [2, 4]


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the call, and after the time that the cluster file gives."""
    heard: list[dict[str, Any]] = []

    def meet(group: object, **options: Any) -> None:
        heard.append(options)
        raise RuntimeError("Ranks 0 failed to pass monitoredBarrier\nC++ frames")

    monkeypatch.setattr(dist, "monitored_barrier", meet)
    with pytest.raises(
        LocalProtocolError, match=r"not all 2 ranks reached OuterLoop\.step within 7 s: .* Ranks 0 failed"
    ):
        SecondOfTwo(b"").barrier("OuterLoop.step")
    assert heard == [{"timeout": timedelta(seconds=7), "wait_all_ranks": True}]


def test_an_exchange_is_complete_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads what was received waits for nothing more. The group of the loop goes with it, once."""
    waited, destroyed = list[str](), list[object]()
    monkeypatch.setattr(dist, "P2POp", lambda function, tensor, rank, group: f"{function.__name__} {rank}")
    begin = lambda work: [SimpleNamespace(wait=lambda one=one: waited.append(one)) for one in work]  # noqa: E731
    monkeypatch.setattr(dist, "batch_isend_irecv", begin)
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    ranks = SecondOfTwo(b"")
    ranks.exchange_tensors({0: torch.ones(1)}, {0: torch.zeros(1)})
    assert waited == ["irecv 0", "isend 0"]
    group = ranks._group
    ranks.close()
    ranks.close()
    assert destroyed == [group]
