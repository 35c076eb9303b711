"""The page's routes for an HTTP server: `/` and `/api/state`, read-only, with headers that let nothing else in.

The server decides who may come; see docs/guides/page.md.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dips.errors import UnavailableMaster

FRESH_S = 0.5  # a document is given to all who ask for so long, so that many pages cost the master as much as one
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
GUARDS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def page_routes(read: Callable[[], Mapping[str, Any]]) -> list[Route]:
    """`read` returns the document or raises UnavailableMaster; it is called in a thread, once at a time."""
    page = (files("dips.view.page") / "page.html").read_text(encoding="utf-8")
    policy = make_policy(page)
    latest, process = _Latest(read), uuid.uuid4().hex  # a revision counts from the master's start

    async def show_page(request: Request) -> Response:
        return Response(page, headers={**GUARDS, "Content-Security-Policy": policy}, media_type="text/html")

    async def answer_state(request: Request) -> Response:
        try:
            state = await latest.read_state()
        except UnavailableMaster as error:
            return JSONResponse({"error": str(error)}, 503, {**GUARDS, "Content-Security-Policy": NOTHING})
        name = f"{process}.{state['curves']['revision']}"
        known = request.query_params.get("curves", "") == name
        curves = {"name": name} if known else {"name": name, **state["curves"]}
        body = json.dumps({**state, "curves": curves}, separators=(",", ":"), allow_nan=False)
        headers = {**GUARDS, "Content-Security-Policy": NOTHING}
        return Response(body, headers=headers, media_type="application/json")

    return [Route("/", show_page), Route("/api/state", answer_state)]


NOTHING = "default-src 'none'; frame-ancestors 'none'"  # for what is no page


def make_policy(page: str) -> str:
    """Only the page's own script and style run, only this server is asked, and no text ever becomes markup."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(hashes['script'])}",
            f"style-src {' '.join(hashes['style'])}",
            "connect-src 'self'",
            "img-src data:",  # its sign in the browser's tab
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


class _Latest:
    """The newest document, read again when it is no longer fresh."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read, self._gate = read, asyncio.Lock()
        self._state: Mapping[str, Any] = {}
        self._read_at = float("-inf")

    async def read_state(self) -> Mapping[str, Any]:
        async with self._gate:
            if time.monotonic() - self._read_at > FRESH_S:
                self._state = await run_in_threadpool(self._read)
                self._read_at = time.monotonic()
            return self._state
