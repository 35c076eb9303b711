"""Accepts connections of the HTTP port on its own thread and loop, so that readers do not use the daemon's loop.

What must stay true: there are never more than MOST_CONNECTIONS sockets, handshakes included, and a client that fills
them cannot keep a probe out: the oldest connection is closed for a new one.
"""

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
from uvicorn.server import ServerState

from dips.errors import ConfigError
from dips.http.connection import IDLE_S, MAX_HEADER_BYTES, HttpConnection
from dips.http.contexts import ServerContexts
from dips.telemetry.refusals import count_refusal
from dips.transport.tls import TlsSource

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
        self._started.wait(STOP_S)

    def close(self) -> None:
        """End every connection and the thread."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(STOP_S)
        self._listener.close()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda loop, context: None)  # failed handshakes, which any client can cause
        self._config.load()
        tasks = [asyncio.create_task(self._accept_all()), asyncio.create_task(self._keep_date())]
        self._started.set()
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        for end in list(self._open.values()):
            end()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # let the ended connections close

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
