"""A forked program cannot tell that it was not started, and neither can who started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from coverage import CoverageData
from coverage.exceptions import DataError

from dips import files
from dips.client.agent.trainer import TrainerProcess
from tests.forkserver import client, fixtures
from tests.forkserver.command import CONSOLE_SCRIPT, agrees, parse
from tests.waiting import until

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


@pytest.mark.parametrize(
    ("form", "options"),
    [
        pytest.param(
            form, options, id=f"{form}-{options}", marks=[pytest.mark.slow] * bool(options and form != "script")
        )
        for form in FORMS
        for options in ({}, {"start_new_session": True}, {"process_group": 0}, {"umask": 0o026})
    ],
)
def test_a_program_sees_the_same(tmp_path: Path, form: str, options: dict[str, Any]) -> None:
    """Arguments, paths, environment, session, group, parent, descriptors, handlers, buffers: as when it is started."""
    environment = {**os.environ, "DIPS_PROBE": "here"}
    environment.pop("PYTHONUNBUFFERED", None)
    forked, _, served = started(form, tmp_path / "out", env=environment, **options)
    with client.real_commands():
        real, _, none = started(form, tmp_path / "out", env=environment, **options)
    assert (served, none) == (1, 0)
    assert forked == real


async def test_a_training_command_is_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the agent starts it, whose own files are private: else every rank of every test imports torch by itself."""
    monkeypatch.setattr(files, "_given", 0o027)
    server = fixtures._server()
    before, out = server.served, tmp_path / "out"
    process = await TrainerProcess.start([sys.executable, str(PROBE), str(out), ""], {})
    assert await process.wait() == 0
    assert server.served == before + 1 and json.loads(out.read_text())["umask"] == 0o027


@pytest.mark.parametrize("end", ["", "9", "some words", "raise", "TERM", "KILL", "INT"])
def test_a_program_ends_the_same(tmp_path: Path, end: str) -> None:
    """Codes, signals and last words; threads are waited for, and exit handlers run."""
    _, forked, served = started("script", tmp_path / "out", end)
    with client.real_commands():
        _, real, _ = started("script", tmp_path / "out", end)
    assert served == 1
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


@pytest.mark.parametrize("end", ["", "9", "some words", "TERM", "KILL"])
def test_a_command_of_a_script_ends_the_same(tmp_path: Path, python_of_scripts: str, end: str) -> None:
    """By the door: arguments, standard input and output, environment, directory, code or signal."""
    seen = []
    for python in (python_of_scripts, sys.executable):
        script = f'{python} {PROBE} {tmp_path / "out"} "{end}"; echo "$?"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, input="said\n", cwd=tmp_path)
        found = json.loads((tmp_path / "out").read_text())
        seen.append((done.stdout, *(found[name] for name in ("argv", "path", "cwd", "stdin", "fds", "command"))))
    assert seen[0] == seen[1]


def test_a_signal_to_a_command_of_a_script_is_passed_on(tmp_path: Path, python_of_scripts: str) -> None:
    """TERM reaches the program as it is; who is killed takes the program along."""
    script = tmp_path / "waits.py"
    script.write_text("import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    for at, number in enumerate((signal.SIGTERM, signal.SIGKILL)):
        asker = subprocess.Popen(["bash", "-c", f"exec {python_of_scripts} {script} {tmp_path}/pid{at}"])
        until(lambda at=at: (tmp_path / f"pid{at}").exists() and (tmp_path / f"pid{at}").read_text())
        pid = int((tmp_path / f"pid{at}").read_text())
        assert Path(f"/proc/{pid}").exists() and pid != asker.pid
        asker.send_signal(number)
        assert asker.wait(10) == -number
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists())


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


def test_the_lines_of_a_forked_program_are_its_own_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `make coverage`: a server serves many tests, of which one has started it."""
    monkeypatch.setenv("COVERAGE_PROCESS_START", str(client.ROOT / "pyproject.toml"))
    monkeypatch.setenv("COVERAGE_DATA", str(tmp_path / "data"))
    names = ["test_a.py::test_starts (call)", "test_b.py::test_asks (call)", "test_c.py::test_asks (call)"]
    monkeypatch.setenv("PYTEST_CURRENT_TEST", names[0])
    server, process = client.start()
    try:
        with client.forking(server):
            for name in names[1:]:
                command = [sys.executable, "-m", "dips.cli", "--version"]
                subprocess.run(command, env={**os.environ, "PYTEST_CURRENT_TEST": name}, check=True)
        assert server.served == 2
    finally:
        server.close()
        process.wait()

    def contexts() -> set[str]:
        found = set[str]()
        for file in tmp_path.glob("data*"):
            measured = CoverageData(str(file))
            with suppress(DataError):  # a program that has ended for its caller may still write it
                measured.read()
                found |= measured.measured_contexts()
        return found - {""}

    until(lambda: contexts() == set(names[1:]), contexts)
