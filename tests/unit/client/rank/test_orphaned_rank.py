"""How a rank ends whose agent is gone: told on what is still open, with time for its exit handlers, and in any case."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dips.client.ipc.address import AGENT_HOME, AGENT_PID, OnThisHost, process_home
from dips.client.rank import joining

TOLD = "dips: the agent at tcp://head:7 is gone: this rank ends\n"


def end_in_fork(prepare: Callable[[], object], directory: Path) -> tuple[int, float]:
    """Let a forked process find that its agent is gone; return its exit code, and after how many seconds it ended."""
    began = time.monotonic()
    if (pid := os.fork()) == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.stdout, sys.stderr = (directory / "out").open("w"), (directory / "err").open("w")
            prepare()
            joining._end_process("at tcp://head:7")
            time.sleep(20)
        finally:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), time.monotonic() - began


def ignore_sigterm() -> None:
    """As a rank does that is blocked in a collective of C++ code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def break_stderr() -> None:
    """It was a pipe to the agent."""
    reader, writer = os.pipe()
    os.close(reader)
    sys.stderr = os.fdopen(writer, "w")


@pytest.mark.parametrize(
    ("prepare", "grace_s", "code", "told_on"),
    [
        (lambda: None, 15.0, -signal.SIGTERM, "err"),
        (ignore_sigterm, 0.3, 128 + signal.SIGTERM, "err"),
        (break_stderr, 15.0, -signal.SIGTERM, "out"),
    ],
    ids=["SIGTERM ends it", "SIGTERM is ignored", "standard error is gone"],
)
def test_a_rank_ends_without_its_agent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[], None],
    grace_s: float,
    code: int,
    told_on: str,
) -> None:
    """By SIGTERM, so that the script's handlers run; by force when these have had their time."""
    monkeypatch.setattr(joining, "GRACE_S", grace_s)
    ended, took_s = end_in_fork(prepare, tmp_path)
    assert ended == code
    assert (took_s >= grace_s) is (code > 0)
    assert [(tmp_path / name).read_text() for name in ("out", "err")] == [TOLD * (told_on == n) for n in ("out", "err")]


def open_high(pid: int) -> int:
    """Open a process as where a data set has a thousand files open."""
    low = os.pidfd_open(pid)
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024)
    os.close(low)
    return high


def test_a_rank_with_many_files_watches_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch ended at once, with a ValueError of its thread, and the rank trained on without its agent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2048)), hard))
    ended = threading.Event()
    monkeypatch.setattr(joining, "_watched", False)
    monkeypatch.setattr(joining, "_end_process", lambda which: ended.set())
    agent = subprocess.Popen(["sleep", "60"])
    with monkeypatch.context() as patch:
        patch.setattr(joining, "os", SimpleNamespace(pidfd_open=open_high))
        joining._watch_process(agent.pid)
    agent.kill()
    agent.wait()
    assert ended.wait(10)


@pytest.mark.parametrize("gone", [False, True])
def test_a_rank_watches_the_process_of_its_agent(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """On the agent's own machine, once however many loops it makes; an agent that is gone already is seen at once."""
    told, ended = list[str](), threading.Event()
    monkeypatch.setattr(joining, "_watched", False)
    monkeypatch.setattr(joining, "_end_process", lambda which: (told.append(which), ended.set()))
    agent = subprocess.Popen(["sleep", "60"])
    monkeypatch.setenv(AGENT_HOME, process_home())
    monkeypatch.setenv(AGENT_PID, str(agent.pid))
    if gone:
        agent.kill()
        agent.wait()
    for _ in range(2):
        joining.watch_agent(OnThisHost(Path("/nowhere/agent.sock"), "directory"), 1.0)()
    assert gone or not ended.wait(0.05)
    agent.kill()
    agent.wait()
    assert ended.wait(10) and told == [f"(process {agent.pid})"]
