"""The HTTP port's listener."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dips.http.daemon import WAKE_S, LoopWatch, call_on_loop
from dips.http.server import HttpConnection, HttpServer, bind_socket, make_context
from dips.identity.names import PeerRole
from dips.identity.tls_files import load_tls
from dips.telemetry.refusals import refusals_by_reason
from dips.transport.tls import TlsSource
from tests.enrolled import Enrolled
from tests.open_files import nothing_left_open
from tests.waiting import until


def test_a_daemon_that_starts_again_has_its_port_at_once() -> None:
    """Connections that it closed itself hold the port for a minute (TIME_WAIT), and Prometheus has such."""
    listener = bind_socket("127.0.0.1", 0)
    host, port = listener.getsockname()
    with listener, socket.create_connection((host, port)) as scraper:
        listener.setblocking(True)
        listener.accept()[0].close()  # first to close is who waits
        assert scraper.recv(1) == b""
    bind_socket(host, port).close()


async def test_a_loop_that_is_held_up_shows_it() -> None:
    """By as much as its next turn comes late."""
    watch = LoopWatch()
    await asyncio.sleep(0)
    time.sleep(WAKE_S + 0.2)
    await asyncio.sleep(0.01)
    assert 0.2 <= watch.lag.total < 10
    await watch.stop_watching()


async def test_what_a_request_asks_of_the_loop_is_answered_or_raised() -> None:
    """Whoever waits for the answer hears what went wrong instead of waiting for as long as it may."""
    loop = asyncio.get_running_loop()
    assert await asyncio.wait_for(asyncio.wrap_future(call_on_loop(loop, lambda: 7)), 10) == 7
    with pytest.raises(KeyError, match="slaves"):
        await asyncio.wait_for(asyncio.wrap_future(call_on_loop(loop, lambda: {}["slaves"])), 10)
    ended = asyncio.new_event_loop()
    ended.close()
    answer = call_on_loop(ended, lambda: 7)
    assert answer.done() and isinstance(answer.exception(), TimeoutError), "nobody is left to answer"


async def _answer_shortly(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def test_a_listener_that_fails_holds_up_no_connection() -> None:
    """As when the process may open no more files: who is connected is answered, and the port ends when it is told."""
    server = HttpServer(_answer_shortly, listener := bind_socket("127.0.0.1", 0), None)
    server.start()
    scraper = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    for _ in range(3):
        scraper.request("GET", "/")
        assert scraper.getresponse().read() == b""
        with suppress(OSError):  # it is not connected any more, the second time
            listener.shutdown(socket.SHUT_RDWR)
    scraper.close()
    server.close()
    assert not server._thread.is_alive()


def test_who_is_thrown_out_before_its_turn_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that wait in the backlog are accepted in one turn of the loop: the newest stay."""
    monkeypatch.setattr("dips.http.server.MOST_CONNECTIONS", 1)
    server = HttpServer(_answer_shortly, bind_socket("127.0.0.1", 0), None)
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(3)]
    server.start()
    clients[2].sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    heard = [client.recv(1000) for client in clients]
    server.close()
    for client in clients:
        client.close()
    assert heard[:2] == [b"", b""] and heard[2].startswith(b"HTTP/1.1 204")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_port_that_cannot_begin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread prints what ended it, and a daemon does not go on without its port."""
    monkeypatch.setattr("dips.http.server.STOP_S", 0.01)
    server = HttpServer("dips.no_such_module:application", bind_socket("127.0.0.1", 0), None)
    with pytest.raises(RuntimeError, match="ended as it began"):
        server.start()
    server.close()


def test_a_request_has_its_time_and_a_pause_between_two_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the connection's beginning, and then from each request's first byte, to the end of its answer."""
    made = list[Any]()

    class Seen(HttpConnection):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    def until_timed(timed: bool) -> None:
        until(lambda: made and (made[0]._request_timer is not None) is timed)

    monkeypatch.setattr("dips.http.server.HttpConnection", Seen)
    server = HttpServer(_answer_shortly, bind_socket("127.0.0.1", 0), None)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        until_timed(True)
        for _ in range(2):
            client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 204")
            until_timed(False)
        client.sendall(b"G")
        until_timed(True)
    until_timed(False)  # who has gone is not slow
    assert made[0]._end_timer.cancelled(), "nothing of it is kept for the rest of its ten minutes"
    server.close()


def test_who_is_connected_when_the_port_ends_hears_of_it() -> None:
    server = HttpServer(_answer_shortly, bind_socket("127.0.0.1", 0), None)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 204")
        server.close()
        assert client.recv(1000) == b"" and not server.connections


def test_a_certificate_that_cannot_be_used_costs_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes is closed and counted, and the port goes on when it can."""
    source = TlsSource(Enrolled(tmp_path).enroll("s0", PeerRole.SLAVE), "s0", PeerRole.SLAVE, "july", pytest.fail)
    server = HttpServer(_answer_shortly, bind_socket("127.0.0.1", 0), source)
    assert server._contexts is not None

    def fail() -> ssl.SSLContext:
        raise ssl.SSLError("key values mismatch")

    monkeypatch.setattr(server._contexts, "current_context", fail)
    before = refusals_by_reason().get("http_handshake", 0)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        assert client.recv(1) == b"" and not server.connections
    assert refusals_by_reason()["http_handshake"] == before + 1
    server.close()


def test_a_new_certificate_leaves_no_file_open(tmp_path: Path) -> None:
    """A day's certificate is renewed for years."""
    enrolled = Enrolled(tmp_path)
    loaded = load_tls(enrolled.enroll("s0", PeerRole.SLAVE))
    with nothing_left_open():
        make_context(loaded)
