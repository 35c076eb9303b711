"""The routes: headers that let nothing else in, a policy that fits the file, one read for many pages."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from dips.errors import UnavailableMaster
from dips.view.page import document, routes

STATE = {"term": 3, "curves": {"revision": 7, "run": [[1, 2.0, 3.0]], "clusters": []}}
PAGE = (files("dips.view.page") / "page.html").read_text(encoding="utf-8")


async def ask(made: list[Route], target: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """One request without a socket."""
    path, _, query = target.partition("?")
    sent: list[dict[str, Any]] = []
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": []}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await Starlette(routes=made)(scope, receive, send)
    headers = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(m.get("body", b"") for m in sent[1:])


async def test_page_and_state_carry_their_guards() -> None:
    """No framing, no sniffing, no referrer, no cache; only GET and HEAD."""
    made = routes.page_routes(lambda: STATE)
    for path, kind in (("/", "text/html; charset=utf-8"), ("/api/state", "application/json")):
        code, headers, _ = await ask(made, path)
        assert code == 200 and headers["content-type"] == kind
        assert {key.lower(): value for key, value in routes.GUARDS.items()}.items() <= headers.items()
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert (await ask(made, path, "POST"))[0] == 405


async def test_the_policy_names_every_inline_block_and_nothing_else_runs() -> None:
    """No wildcard, no inline attribute, no outside address in the file."""
    policy = (await ask(routes.page_routes(lambda: STATE), "/"))[1]["content-security-policy"]
    assert "unsafe" not in policy and "*" not in policy and "http" not in policy
    assert len(re.findall(r"'sha256-", policy)) == len(re.findall(r"<(?:script|style)>", PAGE)) == 2
    assert not re.search(r"<[^>]+\s(?:style|on[a-z]+)=", PAGE.split("<script>")[0])
    outside = set(re.findall(r"https?://[^\s'\"]+", PAGE)) - {"http://www.w3.org/2000/svg"}
    assert not outside
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser", PAGE)


async def test_losses_that_the_page_has_are_not_sent_again() -> None:
    """Another master's may have the same term and revision, of another run at the same port: they are sent."""
    made, others = routes.page_routes(lambda: STATE), routes.page_routes(lambda: STATE)
    first = json.loads((await ask(made, "/api/state?curves="))[2])
    name = first["curves"]["name"]
    assert first == {**STATE, "curves": {"name": name, **STATE["curves"]}}
    assert json.loads((await ask(made, f"/api/state?curves={name}"))[2]) == {"term": 3, "curves": {"name": name}}
    assert b'"run"' in (await ask(made, f"/api/state?curves={name[:-1]}6"))[2]
    assert b'"run"' in (await ask(others, f"/api/state?curves={name}"))[2]
    assert STATE["curves"] == {"revision": 7, "run": [[1, 2.0, 3.0]], "clusters": []}


def test_the_page_reads_the_document_of_its_release() -> None:
    """The page that is open while its master is upgraded, or goes back, meets another one."""
    assert re.findall(r"const FORMAT = (\d+);", PAGE) == [str(document.FORMAT)]


async def test_many_pages_cost_the_master_one_read() -> None:
    reads = []

    def read() -> Mapping[str, Any]:
        reads.append(1)
        return STATE

    made = routes.page_routes(read)
    answers = await asyncio.gather(*(ask(made, "/api/state") for _ in range(50)))
    assert {code for code, _, _ in answers} == {200} and len(reads) == 1


async def test_a_master_that_does_not_answer_is_said_so() -> None:
    """503 with the reason; the page shows it, and asks again."""

    def read() -> Mapping[str, Any]:
        raise UnavailableMaster("the master's loop did not answer within 5 s")

    code, headers, body = await ask(routes.page_routes(read), "/api/state")
    assert code == 503 and body == b'{"error":"the master\'s loop did not answer within 5 s"}'
    assert headers["cache-control"] == "no-store"
