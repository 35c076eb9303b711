"""`dips status --watch` where there is no terminal: a line a second, so that a log or a pipe has something."""

from __future__ import annotations

import io
import json
from functools import partial
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands import status
from dips.errors import Busy, UnavailableMaster
from dips.transport.endpoints import Endpoint

ANSWER = {"head": "v1@r1", "rounds": {"applied": 1}, "clusters": {}, "slaves": {}}


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that is away for a moment, and whoever watches it until Ctrl-C."""
    answers: list[Any] = [ANSWER, UnavailableMaster("[fd00::1]:7800: nobody answers [/]"), Busy("full"), ANSWER]

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


@pytest.mark.parametrize("as_json", [False, True])
def test_watching_into_a_pipe_prints_a_line_a_second(as_json: bool) -> None:
    """It printed nothing: what was drawn waited for a terminal. A master that is away, or is asked too
    much at once, is said on standard error, and Ctrl-C ends it without an error.
    """
    words = ["status", "--watch", "--master", "127.0.0.1:1", *(["--json"] if as_json else [])]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, repr(done.exception)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and done.stderr == "[fd00::1]:7800: nobody answers [/]; asking again\nfull; asking again\n"
    assert all(json.loads(line) == ANSWER if as_json else "head v1@r1, 1 applied" in line for line in lines)


def test_watching_on_a_terminal_draws_each_answer_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why none came is text: an address in brackets was missing, and a closing tag ended the command."""
    screen = io.StringIO()
    monkeypatch.setattr(status, "Console", partial(Console, file=screen, force_terminal=True, width=80, height=24))
    done = CliRunner().invoke(cli, ["status", "--watch", "--master", "127.0.0.1:1"])
    assert done.exit_code == 0 and done.output == "", repr(done.exception)
    before, _, after = screen.getvalue().partition("[fd00::1]:7800: nobody answers [/]; asking again")
    assert "v1@r1" in before and "v1@r1" in after
