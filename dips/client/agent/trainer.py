"""The training command as a process group: started, ended, and cleaned up (docs/rationale.md#27).

torchrun puts its workers into separate sessions, so SIGKILL to its group leaves them running. The agent is their
subreaper: they become its children and are killed here, so that two launches never overlap.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dips.private_files import umask_given


class TrainerProcess:
    """One launch of the training command."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], stderr: int | None = None
    ) -> TrainerProcess:
        """Start `command` in its own process group, with `environment` added to ours and `stderr`, a file descriptor,
        as standard error (None: ours).
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dips.client.agent.launch", str(os.getpid()), "--", *command),
            env={**os.environ, **environment},
            process_group=0,
            umask=umask_given(),
            stderr=stderr,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the process to end; return its exit code, 128 + the signal's number if a signal killed it."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group; does nothing if the process has ended."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def end_within(self, grace_s: float) -> int:
        """Send SIGTERM, then SIGKILL after `grace_s`. Return the exit code."""
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return await self.wait()


def list_descendants(root: int) -> list[int]:
    """Return the ids of all processes below `root`, parents first; processes that end meanwhile are omitted."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # the process has ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, at = [], [root]
    while at:
        below = children.get(at.pop(), [])
        found += below
        at += below
    return found


def kill_leftovers() -> list[int]:
    """Kill every process below this one and reap those that are our children; return their ids.

    Only valid if no child may survive: the agent starts nothing but the trainer.
    """
    killed: list[int] = []
    while left := [pid for pid in list_descendants(os.getpid()) if pid not in killed]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed += left
    for pid in killed:  # orphans became our children; a grandchild's parent may still be reaping it
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return killed
