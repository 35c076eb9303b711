"""No process survives a test that was killed: `python guard.py FD MARK PID...`, started before anything else.

It waits until the other end of the pipe FD is closed, which the kernel does however pytest ends, or until one of the
processes PID is gone (the pytest that leads the workers of xdist); then it kills all in whose environment MARK stands.
Forked programs show the environment of their server, which has it, too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress


def main(fd: int, mark: bytes, leaders: list[int]) -> None:
    waited = [fd]
    with suppress(ProcessLookupError):
        waited += [os.pidfd_open(pid) for pid in leaders]
        select.select(waited, [], [])
    while marked := [pid for pid in _processes() if mark in _environment(pid)]:  # until none starts another
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> list[bytes]:
    """Empty for one that is ending, and for one of another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(int(sys.argv[1]), os.fsencode(sys.argv[2]), [int(pid) for pid in sys.argv[3:]])
