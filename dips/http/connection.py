"""One connection of the HTTP port: uvicorn's, with the client's certificate in its scope and a limit on every wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from dips.telemetry.refusals import count_refusal

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
        """Count a request that h11 rejects."""
        count_refusal("http_request")
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
