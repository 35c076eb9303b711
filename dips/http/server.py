"""Accepts connections of the HTTP port on its own thread and loop, so that readers do not delay the daemon."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from dips.errors import ConfigError
from dips.identity.tls_files import LoadedTls
from dips.telemetry.refusals import count_refusal
from dips.transport.tls import TlsSource, load_certificate

# ---- contexts -------------------------------------------------------------------------------------------------------
# The TLS of the HTTP port: presents the daemon's own certificate and requests one from the client, which may have none.
#
# Each connection uses the files of its time, so that a renewed certificate needs no restart.


class ServerContexts:
    """The SSL context for the present files; on one thread."""

    def __init__(self, source: TlsSource) -> None:
        self._source = source
        self._loaded = source.read_current()
        self._context = make_context(self._loaded)

    def current_context(self) -> ssl.SSLContext:
        loaded = self._source.read_current()
        if loaded is not self._loaded:
            self._loaded, self._context = loaded, make_context(loaded)
        return self._context


def make_context(loaded: LoadedTls) -> ssl.SSLContext:
    """Return a context with our certificate that accepts clients of our authority and clients without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=loaded.ca.decode("ascii"))
    load_certificate(context, loaded)
    return context


# ---- connection -----------------------------------------------------------------------------------------------------


REQUEST_S = 10.0  # from a request's first byte, or the connection's beginning, to the end of its answer
IDLE_S = 20  # between two requests: a scraper with an interval of 15 s keeps its connection
CONNECTION_S = 600.0  # then a client must reconnect, with a certificate that is still valid
MAX_HEADER_BYTES = 16 << 10  # of a request, with its first line
CERTIFICATE = "dips.certificate"  # key in the scope: DER of the client's certificate, None without one


class HttpConnection(H11Protocol):
    """A connection that calls `on_lost` once at its end."""

    def __init__(self, config: Config, state: ServerState, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(config, state, {}, _loop=loop)
        self.on_lost: Callable[[], None] = lambda: None
        self._request_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        certificate = tls.getpeercert(binary_form=True) if tls is not None else None
        app = self.app

        async def with_certificate(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, CERTIFICATE: certificate}, receive, send)

        self.app = with_certificate
        self._end_timer = self.loop.call_later(CONNECTION_S, self._end_soon)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._start_timer()
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Count a request that h11 rejects. If that is for its body, what its headers have begun says no more."""
        count_refusal("http_request")
        if self.cycle is not None:
            self.cycle.disconnected = True
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        self._stop_timer()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._end_timer is not None:
            self._end_timer.cancel()
        super().connection_lost(exc)
        self.on_lost()

    def _start_timer(self) -> None:
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_S, self._end_slow)

    def _end_slow(self) -> None:
        """End a connection whose client sends half a request, or does not read the answer."""
        count_refusal("http_slow")
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _end_soon(self) -> None:
        """End the connection after the answer in progress, if there is one."""
        self.shutdown()
        self._start_timer()


# ---- server ---------------------------------------------------------------------------------------------------------
# Accepts connections of the HTTP port on its own thread and loop, so that readers do not use the daemon's loop.
#
# What must stay true: there are never more than MOST_CONNECTIONS sockets, handshakes included, and a client that fills
# them cannot keep a probe out: the oldest connection is closed for a new one.


MOST_CONNECTIONS = 64  # a few scrapers, probes and people
BACKLOG = 64
HANDSHAKE_S = 5.0
ACCEPT_PAUSE_S = 0.2  # after a failed accept, for example without a free file descriptor
STOP_S = 5.0


def bind_socket(host: str, port: int) -> socket.socket:
    """Listen at host, port (0 takes a free one); raise ConfigError if it is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"http: cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _close_cancelled(connection: socket.socket, begun: asyncio.Task[None]) -> None:
    """Close a connection that was ended before it had a transport, which would close it."""
    if begun.cancelled():
        connection.close()


class HttpServer:
    """Serves an ASGI application until it is closed."""

    def __init__(self, app: Any, listener: socket.socket, tls: TlsSource | None) -> None:
        """`tls` has the certificate to present; None: plain text."""
        # Otherwise any client could fill the log with lines about its invalid requests.
        quiet = logging.getLogger("uvicorn.error")
        quiet.handlers, quiet.propagate = [logging.NullHandler()], False
        self._config = Config(
            app, http=HttpConnection, ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_keep_alive=IDLE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )  # fmt: skip
        self._listener, self._contexts = listener, ServerContexts(tls) if tls is not None else None
        self._state = ServerState()
        self._open: dict[int, Callable[[], None]] = {}  # number → function that ends the connection, the oldest first
        self._accepted = 0
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="http", daemon=True)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def connections(self) -> int:
        return len(self._open)

    def start(self) -> None:
        self._thread.start()
        while not self._started.wait(STOP_S):
            if not self._thread.is_alive():
                raise RuntimeError("the thread of the HTTP port ended as it began")  # and has printed why

    def close(self) -> None:
        """End every connection and the thread."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(STOP_S)
        self._listener.close()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._config.load()
        # `asyncio.run` cancels them.
        self._tasks = [asyncio.create_task(self._accept_all()), asyncio.create_task(self._keep_date())]
        self._started.set()
        await self._stop.wait()
        for end in list(self._open.values()):
            end()

    async def _keep_date(self) -> None:
        while True:
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            await asyncio.sleep(1.0)

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._open) >= MOST_CONNECTIONS:
                count_refusal("http_connections")
                self._open.pop(next(iter(self._open)))()
            self._accepted += 1
            number = self._accepted
            task = loop.create_task(self._begin_connection(number, connection))
            task.add_done_callback(partial(_close_cancelled, connection))
            self._open[number] = task.cancel  # type: ignore[assignment]

    async def _begin_connection(self, number: int, connection: socket.socket) -> None:
        """Make the TLS handshake, if the port has a certificate, and start HTTP."""
        loop, made = asyncio.get_running_loop(), list[HttpConnection]()

        def make_protocol() -> HttpConnection:
            made.append(HttpConnection(self._config, self._state, loop))
            made[0].on_lost = lambda: self._forget(number)
            return made[0]

        try:
            context = self._contexts.current_context() if self._contexts is not None else None
            wait_s = HANDSHAKE_S if context is not None else None
            await loop.connect_accepted_socket(make_protocol, connection, ssl=context, ssl_handshake_timeout=wait_s)
        except (OSError, ssl.SSLError, ValueError):
            count_refusal("http_handshake")
            self._forget(number)
            connection.close()
        else:
            if number in self._open:
                self._open[number] = made[0].transport.abort

    def _forget(self, number: int) -> None:
        self._open.pop(number, None)
