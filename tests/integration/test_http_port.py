"""The HTTP port over real sockets: probes, limits, TLS with renewal, and a loop that hangs."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import structlog
from structlog.testing import capture_logs

from dips.errors import ConfigError
from dips.http import daemon, server
from dips.http.daemon import HttpSubject, serve_http
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles
from dips.telemetry.refusals import refusals_by_reason
from dips.transport import tls as tls_files
from dips.transport.tls import TlsSource
from tests.enrolled import Enrolled
from tests.waiting import eventually

ANY = "0.0.0.0:0"  # not loopback: TLS


def subject(unready: Callable[[], str] = str, read: Callable[[], dict[str, Any]] = dict) -> HttpSubject:
    return HttpSubject("my-run", "master", read, lambda status: (), unready, {"directory": Path("/")})


@asynccontextmanager
async def serving(
    what: HttpSubject, address: str = "127.0.0.1:0", tls: TlsSource | None = None, token: Path | None = None
) -> AsyncIterator[int]:
    with capture_logs() as told:
        close = await serve_http(address, token, tls, what, structlog.get_logger())
    try:
        yield int(told[-1]["address"].rpartition(":")[2])
    finally:
        await close()
        await eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("http text")])


def get(
    port: int,
    path: str,
    headers: dict[str, str] | None = None,
    context: ssl.SSLContext | None = None,
    method: str = "GET",
) -> tuple[int, bytes]:
    made = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        if context is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    )
    try:
        made.request(method, path, headers=headers or {})
        answer = made.getresponse()
        return answer.status, answer.read()
    finally:
        made.close()


async def ask(port: int, path: str, **more: Any) -> tuple[int, Any]:
    status, body = await asyncio.to_thread(lambda: get(port, path, **more))
    return status, json.loads(body) if body.startswith(b"{") else body.decode()


async def test_probes_say_how_it_stands() -> None:
    """Healthy at once; ready as soon as the daemon says so, and until then why not."""
    reason = ["waits for slave-1"]
    async with serving(subject(lambda: reason[0])) as port:
        assert await ask(port, "/healthz") == (200, {"healthy": True})
        assert await ask(port, "/readyz") == (503, {"ready": False, "reason": "waits for slave-1"})
        reason[0] = ""
        assert await ask(port, "/readyz") == (200, {"ready": True, "reason": ""})
        status, text = await ask(port, "/metrics")
        assert status == 200 and 'dips_build_info{role="master",run="my-run",version="' in text
        assert 'dips_ready{run="my-run"} 1.0' in text and 'process_open_fds{run="my-run"}' in text
        assert 'dips_disk_free_bytes{directory="directory",run="my-run"}' in text
        assert (await ask(port, "/nowhere"))[0] == 404


async def test_a_loop_that_hangs_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loop is asked: while it does not answer, both probes say so in time."""
    monkeypatch.setattr(daemon, "PROBE_S", 0.1)
    async with serving(subject()) as port:
        answers = [asyncio.to_thread(get, port, path) for path in ("/healthz", "/readyz")]
        running = [asyncio.ensure_future(answer) for answer in answers]
        await asyncio.sleep(0)
        time.sleep(0.5)  # the daemon's loop does nothing else
        for status, body in await asyncio.gather(*running):
            assert status == 503 and "the event loop has not answered for 0.1 s" in json.loads(body)["reason"]
        assert (await ask(port, "/healthz"))[0] == 200


async def test_a_view_that_fails_is_logged() -> None:
    """Prometheus hears that it failed; why is in the daemon's log, with a traceback."""
    with capture_logs() as told:
        async with serving(subject(read=lambda: {}["slaves"])) as port:
            assert (await ask(port, "/metrics"))[0] == 500
            assert (await ask(port, "/healthz"))[0] == 200
    assert [row["event"] for row in told if row["log_level"] == "error"] == ["http_failed"]


async def test_scrapes_read_one_view() -> None:
    """Twenty scrapes at once cost the daemon's loop one look."""
    looks = list[int]()

    def read() -> dict[str, Any]:
        looks.append(1)
        return {}

    async with serving(subject(read=read)) as port:
        assert {status for status, _ in await asyncio.gather(*(ask(port, "/metrics") for _ in range(20)))} == {200}
    assert len(looks) <= 2


async def test_it_is_read_only_and_takes_no_body() -> None:
    before = refusals_by_reason().get("http_request", 0)
    async with serving(subject()) as port:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert (await ask(port, "/metrics", method=method))[0] == 405
            assert (await ask(port, "/nowhere", method=method))[0] == 405, "whatever routes a daemon adds"
        assert (await ask(port, "/healthz", headers={"Content-Length": "5"}))[0] == 413
        assert (await ask(port, "/metrics", headers={"Host": "evil.example"}))[0] == 403
        assert (await ask(port, "/metrics", headers={"X": "y" * server.MAX_HEADER_BYTES}))[0] == 431
    assert refusals_by_reason()["http_request"] == before + 10


async def test_who_is_slow_or_many_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections beyond the most end the oldest; one that sends half a request ends in time; a probe comes through."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 8)
    monkeypatch.setattr(server, "REQUEST_S", 0.3)
    before, slow = refusals_by_reason().get("http_connections", 0), refusals_by_reason().get("http_slow", 0)
    async with serving(subject()) as port:
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        held[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert (await ask(port, "/healthz"))[0] == 200
        assert refusals_by_reason()["http_connections"] >= before + 12
        for one in held:
            one.settimeout(5)
            with suppress(ConnectionResetError):
                assert await asyncio.to_thread(one.recv, 1) == b""
            one.close()
        assert refusals_by_reason()["http_slow"] > slow


async def test_what_is_not_http_is_answered_and_counted() -> None:
    """A person who speaks TLS to a port of plain text gets a line that says so much."""
    before = refusals_by_reason().get("http_request", 0)
    async with serving(subject()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
    assert refusals_by_reason()["http_request"] == before + 1


async def test_a_body_that_is_none_writes_no_log() -> None:
    """Anybody who reaches the port, before any check of who reads, could fill the disk with tracebacks: the request was
    answered twice, once for its headers and once for its body, and the second answer failed.
    """
    with capture_logs() as told:
        async with serving(subject()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()
            assert (await ask(port, "/healthz"))[0] == 200
    assert [row["event"] for row in told] == []


async def test_a_connection_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its client is idle, or does not read the answer: with TLS the next one shows a newer certificate."""
    monkeypatch.setattr(server, "CONNECTION_S", 0.05)

    async def answer_much(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(8 << 20)})

    served = server.HttpServer(answer_much, server.bind_socket("127.0.0.1", 0), None)
    served.start()
    try:
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as idle:
            idle.sendall(b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n")
            while await asyncio.to_thread(idle.recv, 1 << 16):
                pass
        monkeypatch.setattr(server, "REQUEST_S", 0.05)
        with socket.create_connection(("127.0.0.1", served.port)) as unread:
            unread.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            await eventually(lambda: served.connections)
            await eventually(lambda: not served.connections)
    finally:
        served.close()
    assert not served._thread.is_alive()


async def test_there_are_never_more_connections_than_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ends for the next one; of those that have ended nothing is kept until their time would be over."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    before, made = refusals_by_reason().get("http_connections", 0), WeakSet[Any]()

    class Counted(server.HttpConnection):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.add(self)

    monkeypatch.setattr(server, "HttpConnection", Counted)
    served = server.HttpServer(None, server.bind_socket("127.0.0.1", 0), None)
    served.start()
    try:
        held = [socket.create_connection(("127.0.0.1", served.port), timeout=5) for _ in range(3)]
        await eventually(lambda: len(made) == 3)
        assert served.connections == 3 and refusals_by_reason().get("http_connections", 0) == before
        held.append(socket.create_connection(("127.0.0.1", served.port), timeout=5))
        assert await asyncio.to_thread(held[0].recv, 1) == b""
        await eventually(lambda: len(made) == 3)
        assert served.connections == 3 and refusals_by_reason()["http_connections"] == before + 1
        for one in held:
            one.close()
        await eventually(lambda: not made and not served.connections)
    finally:
        served.close()


async def test_a_port_in_use_is_named() -> None:
    async with serving(subject()) as port:
        with pytest.raises(ConfigError, match=f"http: cannot listen on 127.0.0.1:{port}"):
            await serve_http(f"127.0.0.1:{port}", None, None, subject(), structlog.get_logger())
    with pytest.raises(ConfigError, match="not loopback and needs certificates"):
        await serve_http("0.0.0.0:0", None, None, subject(), structlog.get_logger())


# ---- off loopback ----------------------------------------------------------------------------------------------------


def client_context(ca: Path, files: TlsFiles | None = None) -> ssl.SSLContext:
    """As a scraper that checks the daemon: by its authority; its name is no address."""
    context = ssl.create_default_context(cafile=str(ca))
    context.check_hostname = False
    if files is not None:
        context.load_cert_chain(files.cert, files.key)
    return context


@pytest.fixture(name="enrolled")
def an_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Enrolled:
    monkeypatch.setattr(tls_files, "LOOK_S", 0.0)
    return Enrolled(tmp_path)


async def test_off_loopback_it_speaks_tls_and_asks_who_reads(enrolled: Enrolled, tmp_path: Path) -> None:
    """Probes for all, metrics for a viewer or the token; a stranger's certificate and plain text are refused."""
    token = tmp_path / "token"
    token.write_text("a" * 32)
    token.chmod(0o600)
    source = TlsSource(enrolled.enroll("master", PeerRole.MASTER), "master", PeerRole.MASTER, enrolled.run)
    viewer = enrolled.enroll("eve", PeerRole.VIEWER)
    stranger = Enrolled(tmp_path / "other").enroll("eve", PeerRole.VIEWER)
    ca = tmp_path / "ca" / "ca.crt"
    before = refusals_by_reason().get("http_handshake", 0)
    async with serving(subject(), ANY, source, token) as port:
        nobody, eve = client_context(ca), client_context(ca, viewer)
        assert (await ask(port, "/healthz", context=nobody))[0] == 200
        assert (await ask(port, "/metrics", context=nobody))[0] == 401
        status, text = await ask(port, "/metrics", context=eve)
        expires = re.search(r'^dips_certificate_expiry_timestamp_seconds\{run="my-run"\} (\S+)$', text, re.MULTILINE)
        assert status == 200 and expires and float(expires[1]) == source.read_current().until.timestamp()
        bearer = {"Authorization": "Bearer " + "a" * 32}
        assert (await ask(port, "/metrics", context=nobody, headers=bearer))[0] == 200
        assert (await ask(port, "/metrics", context=nobody, headers={"Authorization": "Bearer b"}))[0] == 401
        with pytest.raises((ssl.SSLError, OSError)):
            await ask(port, "/metrics", context=client_context(ca, stranger))
        with pytest.raises((http.client.HTTPException, OSError)):
            await ask(port, "/metrics")
        await eventually(lambda: refusals_by_reason().get("http_handshake", 0) >= before + 2)


async def test_certificates_are_renewed_and_revoked_without_a_restart(enrolled: Enrolled, tmp_path: Path) -> None:
    """The next connection sees the new certificate; a revoked viewer is refused at the next request."""
    files = enrolled.enroll("master", PeerRole.MASTER)
    source = TlsSource(files, "master", PeerRole.MASTER, enrolled.run)
    eve = client_context(tmp_path / "ca" / "ca.crt", enrolled.enroll("eve", PeerRole.VIEWER))

    def shown(port: int) -> bytes | None:
        with socket.create_connection(("127.0.0.1", port)) as plain, eve.wrap_socket(plain) as made:
            return made.getpeercert(binary_form=True)

    async with serving(subject(), ANY, source) as port:
        first = await asyncio.to_thread(shown, port)
        enrolled.enroll("master", PeerRole.MASTER)
        assert await asyncio.to_thread(shown, port) != first
        assert (await ask(port, "/metrics", context=eve))[0] == 200
        enrolled.authority.revoke("eve.viewer")
        status, said = await ask(port, "/metrics", context=eve)
        assert status == 403 and "revoked" in said["error"]
        assert (await ask(port, "/healthz", context=eve))[0] == 200


@pytest.mark.timeout(60)
async def test_no_file_stays_open() -> None:
    """A hundred connections, with and without requests, leave nothing behind."""
    async with serving(subject()) as port:
        await ask(port, "/metrics")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            socket.create_connection(("127.0.0.1", port)).close()
            assert (await ask(port, "/healthz"))[0] == 200
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)
