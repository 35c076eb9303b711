"""How a rank ends whose agent is gone: told on what is still open, with time for its exit handlers, and in any case."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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
