"""The routes of the HTTP port: two probes, the metrics, and those that a daemon adds. Read-only: only GET and HEAD."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from dips.http.access import PROBES, Door
from dips.http.connection import CERTIFICATE, MAX_HEADER_BYTES
from dips.telemetry.refusals import count_refusal

METHODS = ("GET", "HEAD")
Answered = tuple[bool, dict[str, Any]]
Probe = Callable[[], Awaitable[Answered]]  # (whether all is well, what to answer)
NEVER_STORED = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class SharedProbe:
    """One probe shared by all concurrent requests, so that a flood makes one call on the daemon's loop."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._asking: asyncio.Future[Answered] | None = None

    async def ask_daemon(self) -> Answered:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._probe())
        return await asyncio.shield(self._asking)


def make_app(
    health: Probe, readiness: Probe, metrics: Callable[[], bytes], threads: Executor, routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """Return the ASGI application. `metrics` may block: it is called on `threads`."""

    def answer_probe(probe: Probe) -> Callable[[Request], Awaitable[Response]]:
        shared = SharedProbe(probe)

        async def answer(request: Request) -> Response:
            well, said = await shared.ask_daemon()
            return JSONResponse(said, 200 if well else 503, NEVER_STORED)

        return answer

    async def answer_metrics(request: Request) -> Response:
        try:
            text = await asyncio.get_running_loop().run_in_executor(threads, metrics)
        except TimeoutError:
            return JSONResponse({"error": "the daemon's loop does not answer"}, 503, NEVER_STORED)
        return Response(text, headers={**NEVER_STORED, "content-type": CONTENT_TYPE_LATEST})

    probes = {"/healthz": health, "/readyz": readiness}
    assert set(probes) == PROBES
    return Starlette(
        routes=[
            *(Route(path, answer_probe(probe), methods=METHODS) for path, probe in probes.items()),
            Route("/metrics", answer_metrics, methods=METHODS),
            *routes,
        ]
    )


class RequestGate:
    """The check before the application, which refused requests do not reach."""

    def __init__(self, app: Any, door: Door, report: Callable[[BaseException], None]) -> None:
        """`report` is called with exceptions of the application; the client only learns that there was one."""
        self._app, self._door, self._report = app, door, report

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self._refuse_request(scope)
        try:
            await (answer or self._app)(scope, receive, send)
        except Exception as error:  # logged by `report`
            self._report(error)
            raise

    def _refuse_request(self, scope: Any) -> Response | None:
        if sum(len(key) + len(value) for key, value in scope["headers"]) > MAX_HEADER_BYTES:
            # Headers that arrived at once; h11 limits those that arrive in pieces.
            return _refuse_malformed(431, f"more than {MAX_HEADER_BYTES} bytes of headers")
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        if scope["method"] not in METHODS:
            return _refuse_malformed(405, "this port is read-only: GET or HEAD", {"allow": "GET, HEAD"})
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            return _refuse_malformed(413, "no request here has a body")
        refusal = self._door.check_request(scope["path"], headers, scope[CERTIFICATE])
        if refusal is None:
            return None
        challenge = {"www-authenticate": 'Bearer realm="dips"'} if refusal.status == 401 else {}
        return _refuse(refusal.status, refusal.reason, challenge)


def _refuse_malformed(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    count_refusal("http_request")
    return _refuse(status, reason, headers)


def _refuse(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason}, status, {**NEVER_STORED, "connection": "close", **(headers or {})})
