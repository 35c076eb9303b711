"""`dips status --watch` where there is no terminal: a line a second, so that a log or a pipe has something."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dips.commands import status
from dips.errors import UnavailableMaster
from dips.transport.endpoints import Endpoint, master_peer

ANSWER = {"head": "v1@r1", "rounds": {"applied": 1}, "clusters": {}, "slaves": {}}


@pytest.mark.parametrize("as_json", [False, True])
async def test_watching_into_a_pipe_prints_a_line_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """It printed nothing: what was drawn waited for a terminal. A master that is away is said on standard error."""
    answers: list[Any] = [ANSWER, UnavailableMaster("nobody answers"), ANSWER]

    async def ask_status(stub: Any, master: Endpoint, deadline_s: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pause(seconds: float) -> None:
        if not answers:
            raise asyncio.CancelledError

    monkeypatch.setattr(status, "_ask_status", ask_status)
    monkeypatch.setattr(status.asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        await status._watch_status(master_peer("127.0.0.1:1", None), as_json)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 2 and err == "nobody answers; asking again\n"
    assert all(json.loads(line) == ANSWER if as_json else "head v1@r1, 1 applied" in line for line in lines)
