"""A forked program cannot tell that it was not started, and neither can who started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import client, fixtures
from tests.forkserver.command import CONSOLE_SCRIPT, agrees, parse

PROBE = Path(__file__).with_name("probe.py")
FORMS = {
    "script": [sys.executable, str(PROBE)],
    "unbuffered": [sys.executable, "-u", str(PROBE)],
    "module": [sys.executable, "-m", "tests.integration.probe"],
    "exec": [sys.executable, "-m", "dips.client.agent.launch", str(os.getpid()), "--", sys.executable, str(PROBE)],
}


def started(form: str, out: Path, end: str = "", **options: Any) -> tuple[dict[str, Any], Any, int]:
    """What the probe saw, how it ended and what it wrote, and how many commands were forked."""
    server = fixtures._server()
    before = server.served
    done = subprocess.run([*FORMS[form], str(out), end], capture_output=True, text=True, input="said\n", **options)
    return json.loads(out.read_text()), done, server.served - before


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}, {"process_group": 0}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_program_sees_the_same(tmp_path: Path, form: str, options: dict[str, Any]) -> None:
    """Arguments, paths, environment, session, group, parent, descriptors, handlers, buffers: as when it is started."""
    environment = {**os.environ, "DIPS_PROBE": "here"}
    environment.pop("PYTHONUNBUFFERED", None)
    forked, _, served = started(form, tmp_path / "out", env=environment, **options)
    with client.real_commands():
        real, _, none = started(form, tmp_path / "out", env=environment, **options)
    assert (served, none) == (1, 0)
    assert forked == real


@pytest.mark.parametrize("end", ["", "9", "some words", "raise", "TERM", "KILL", "INT"])
def test_a_program_ends_the_same(tmp_path: Path, end: str) -> None:
    """Codes, signals and last words; threads are waited for, and exit handlers run."""
    _, forked, served = started("script", tmp_path / "out", end)
    with client.real_commands():
        _, real, _ = started("script", tmp_path / "out", end)
    assert served == 1
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


@pytest.mark.parametrize(
    "command", [["true"], ["bash", "x.py"], [sys.executable, "-c", "import x"], [sys.executable, "-X", "dev", "x.py"]]
)
def test_what_is_not_plain_is_started_as_it_stands(command: list[str]) -> None:
    """Code of its own, flags and other programs are for the real command."""
    assert parse(command) is None


def test_another_environment_of_libraries_is_started_as_it_stands() -> None:
    """What Python, OpenMP and numba read when they start cannot be changed in a fork."""
    ours = {"OMP_NUM_THREADS": "1", "PATH": "/bin"}
    assert agrees({"OMP_NUM_THREADS": "1", "PATH": "/sbin", "PYTHONUNBUFFERED": "1"}, ours)
    assert not agrees({"OMP_NUM_THREADS": "2"}, ours)
    assert not agrees({"PYTHONHASHSEED": "1"}, ours)


def test_the_line_of_a_console_script_is_known() -> None:
    assert CONSOLE_SCRIPT.fullmatch("from dips.master.app import main; main()")
