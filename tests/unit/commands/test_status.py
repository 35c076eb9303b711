"""`dips status --watch` where there is no terminal: a line a second, so that a log or a pipe has something."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands import status
from dips.errors import UnavailableMaster
from dips.transport.endpoints import Endpoint

ANSWER = {"head": "v1@r1", "rounds": {"applied": 1}, "clusters": {}, "slaves": {}}


@pytest.mark.parametrize("as_json", [False, True])
def test_watching_into_a_pipe_prints_a_line_a_second(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    """It printed nothing: what was drawn waited for a terminal. A master that is away is said on standard error, and
    Ctrl-C ends it without an error.
    """
    answers: list[Any] = [ANSWER, UnavailableMaster("nobody answers"), ANSWER]

    async def ask_status(stub: Any, master: Endpoint, deadline_s: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pause(seconds: float) -> None:
        if not answers:
            raise KeyboardInterrupt

    monkeypatch.setattr(status, "_ask_status", ask_status)
    monkeypatch.setattr(status.asyncio, "sleep", pause)
    words = ["status", "--watch", "--master", "127.0.0.1:1", *(["--json"] if as_json else [])]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, repr(done.exception)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and done.stderr == "nobody answers; asking again\n"
    assert all(json.loads(line) == ANSWER if as_json else "head v1@r1, 1 applied" in line for line in lines)
