"""The relay passes bytes on, only where a grant goes, and never more than its bounds. Real sockets on loopback."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator

import pytest
import structlog

from dips.client.agent import relay as relays
from dips.client.agent.metrics import read_relay
from dips.client.agent.relay import Relay
from dips.client.ipc.address import keep_alive
from dips.errors import Busy, ConfigError
from dips.ids import GENESIS
from dips.protocol.effects import Grant, SlaveAddress
from dips.telemetry import logs
from dips.telemetry.refusals import refusals_by_reason


class Target:
    """A lane as the relay sees it: says every byte back, or keeps silent and reads nothing."""

    def __init__(self, echo: bool = True) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:{1}".format(*self._listener.getsockname())
        self.accepted: list[socket.socket] = []
        self._threads: list[threading.Thread] = [threading.Thread(target=self._serve, args=(echo,), daemon=True)]
        self._threads[0].start()

    def _serve(self, echo: bool) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted.append(connection)
            if echo:
                thread = threading.Thread(target=self._echo, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _echo(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        except OSError:
            pass  # closed under us
        connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.accepted:
            connection.close()


@pytest.fixture(name="target")
def made_target() -> Iterator[Target]:
    target = Target()
    yield target
    target.close()


def relay(most: int = 8) -> Relay:
    return Relay("127.0.0.1", structlog.get_logger(), most)


def grant(*lanes: str) -> Grant:
    return Grant(GENESIS, (SlaveAddress("s0", 1, lanes, (0,)),), 30.0)


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), 10)
    connection.settimeout(10)
    return connection


def receive(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count and (part := connection.recv(count - len(parts))):
        parts += part
    return bytes(parts)


def lane(made: Relay, *targets: str) -> list[str]:
    return list(made.rewrite_grant(grant(*targets)).slaves[0].lanes)


def test_bytes_are_passed_on_both_ways(target: Target) -> None:
    """Four megabytes there and back are the same bytes; the relay counts them; the port stays that of its lane."""
    made = relay()
    try:
        (address,) = lane(made, target.address)
        assert address != target.address and [address] == lane(made, target.address)
        sent = bytes(range(256)) * (1 << 14)
        with dial(address) as connection:
            writer = threading.Thread(target=connection.sendall, args=(sent,))
            writer.start()
            assert receive(connection, len(sent)) == sent
            writer.join()
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b"", "the relay has counted the bytes before it closes the connection"
        assert made.passed_bytes == 2 * len(sent)
    finally:
        made.close()
    assert made.open_connections == 0


def test_both_sides_of_a_connection_are_kept_alive(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank or a slave whose host is gone is noticed within half a minute: it holds one of few places."""
    kept: list[int] = []

    def keep(connection: socket.socket) -> None:
        keep_alive(connection)
        kept.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))

    monkeypatch.setattr(relays, "keep_alive", keep)
    made = relay()
    try:
        (address,) = lane(made, target.address)
        with dial(address) as connection:
            connection.sendall(b"x")
            assert receive(connection, 1) == b"x" and kept == [10, 10]
    finally:
        made.close()


def test_a_connection_whose_port_is_closed_at_once_leaves_its_place(target: Target) -> None:
    """A task that is cancelled before it has begun runs nothing of itself, no `finally` either."""
    made, (inner, outer) = relay(), socket.socketpair()
    try:
        lane(made, target.address)
        port = made._ports[target.address]
        made._loop.call_soon_threadsafe(lambda: (made._begin_connection(port, inner), made._end_port(port)))
    finally:
        made.close()
    assert made.open_connections == 0 and inner.fileno() == -1
    outer.close()


def test_both_ways_have_ended_before_their_sockets_are_closed(target: Target) -> None:
    """Else a way that ends later takes a socket from the loop that by then is another connection's."""
    ended: list[int] = []

    class Watched(Relay):
        async def _copy_bytes(self, source: socket.socket, sink: socket.socket) -> None:
            try:
                await super()._copy_bytes(source, sink)
            finally:
                ended.append(source.fileno())

    made = Watched("127.0.0.1", structlog.get_logger())
    try:
        (address,) = lane(made, target.address)
        with dial(address) as connection:
            connection.sendall(b"x")
            assert receive(connection, 1) == b"x"
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    finally:
        made.close()
    assert len(ended) == 2 and -1 not in ended


def test_connections_are_bounded(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than the most is closed at once, and is served when there is room again."""
    monkeypatch.setattr(logs, "SELDOM_S", 60.0)
    made = relay(most=2)
    try:
        (address,) = lane(made, target.address)
        first, second = dial(address), dial(address)
        for connection in (first, second):
            connection.sendall(b"x")
            assert receive(connection, 1) == b"x"
        counted = refusals_by_reason().get("relay_full", 0)
        with structlog.testing.capture_logs() as lines:
            for _ in range(10):  # a line each would fill the disk of the log
                with dial(address) as third:
                    assert third.recv(1) == b""
        assert (made.refused, made.open_connections, refusals_by_reason()["relay_full"]) == (10, 2, counted + 10)
        assert [line["event"] for line in lines] == ["relay_full"]
        first.shutdown(socket.SHUT_WR)
        assert first.recv(1) == b"", "the relay has counted the connection out before it closes it"
        assert made.open_connections == 1
        first.close()
        with dial(address) as fourth:
            fourth.sendall(b"y")
            assert receive(fourth, 1) == b"y"
        second.close()
    finally:
        made.close()


def test_connections_go_on_while_no_descriptor_is_left(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener with a waiting connection is ready at once again: without a pause the relay did nothing else. Who
    waited is served when there is a descriptor again.
    """
    monkeypatch.setattr(relays, "ACCEPT_PAUSE_S", 0.01)
    made, limits = relay(), resource.getrlimit(resource.RLIMIT_NOFILE)
    late = socket.socket()
    late.settimeout(10)
    try:
        (address,) = lane(made, target.address)
        with dial(address) as first, structlog.testing.capture_logs() as lines:
            host, _, port = address.rpartition(":")
            first.settimeout(3)
            for number in range(3):
                if number == 1:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
                    late.connect((host, int(port)))
                first.sendall(b"x")
                assert receive(first, 1) == b"x"
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            late.sendall(b"y")
            assert receive(late, 1) == b"y"
        assert {line["event"] for line in lines} == {"relay_cannot_accept"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        late.close()
        made.close()


def test_a_peer_that_reads_nothing_is_sent_nothing_more() -> None:
    """Back-pressure reaches the sender: what the relay holds is its buffer, not the transfer."""
    silent, made = Target(echo=False), relay()
    try:
        (address,) = lane(made, silent.address)
        with dial(address) as connection:
            connection.settimeout(0.3)
            sent = 0
            try:
                while sent < 1 << 30:
                    sent += connection.send(bytes(1 << 20))
            except TimeoutError:
                pass  # nobody takes more
            assert 0 < sent < 64 << 20  # the kernel's four buffers, and ours
    finally:
        made.close()
        silent.close()


def test_a_lane_that_is_granted_no_more_is_closed(target: Target) -> None:
    """A slave that came back has other ports: the old one leads nowhere, and its connection ends."""
    other, made = Target(), relay()
    try:
        (old,) = lane(made, target.address)
        with dial(old) as connection:
            connection.sendall(b"x")
            assert receive(connection, 1) == b"x"
            (new,) = lane(made, other.address)
            assert connection.recv(1) == b""
        with pytest.raises(OSError):
            dial(old)
        with dial(new) as connection:
            connection.sendall(b"y")
            assert receive(connection, 1) == b"y"
    finally:
        made.close()
        other.close()


def test_a_lane_that_cannot_be_reached_ends_the_connection() -> None:
    """The rank sees its connection end, as it would without a relay."""
    made = relay()
    try:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        (address,) = lane(made, f"127.0.0.1:{port}")
        with dial(address) as connection:
            assert connection.recv(1) == b""
    finally:
        made.close()


def test_plain_lanes_are_relayed_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the cluster's network a relay passes on what is encrypted, and nothing else."""
    made = relay()
    try:
        monkeypatch.setattr(made, "_host", "10.0.0.1")
        with pytest.raises(ConfigError, match="lanes of s0 are plain"):
            made.rewrite_grant(grant("127.0.0.1:1"))
    finally:
        made.close()


def test_too_many_lanes_and_a_foreign_host() -> None:
    """Both are refused before anything is opened."""
    with pytest.raises(ConfigError, match=r"relay: cannot listen on 192.0.2.1"):
        Relay("192.0.2.1", structlog.get_logger())
    made = relay()
    try:
        with pytest.raises(Busy, match="2000 lanes"):
            made.rewrite_grant(grant(*(f"127.0.0.1:{port}" for port in range(1, 2001))))
    finally:
        made.close()


def test_as_many_lanes_as_there_are_ports(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused; what the relay has passed on is in the agent's metrics."""
    monkeypatch.setattr(relays, "MOST_LANES", 1)
    made = relay()
    try:
        (address,) = lane(made, target.address)
        with pytest.raises(Busy):
            lane(made, target.address, "127.0.0.1:9")
        with dial(address) as rank:
            rank.sendall(b"abc")
            assert receive(rank, 3) == b"abc"
            assert read_relay(made).items() >= {"relay_open": 1, "relay_refused": 0}.items()
            rank.shutdown(socket.SHUT_WR)
            assert rank.recv(1) == b"", "the relay has counted the bytes before it closes the connection"
            assert read_relay(made).keys() == {"relayed", "relay_open", "relay_refused"}
            assert read_relay(made)["relayed"] == 6
    finally:
        made.close()
    assert read_relay(None) == {}
