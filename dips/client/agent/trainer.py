"""The training command as a process group that is started, ended, and cleaned up after (docs/rationale.md#27).

torchrun puts its workers into sessions of their own, so killing its group hard leaves them behind. The agent is their
subreaper: they become its children and are found and killed here, so that two launches never overlap.
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
        """Start `command` with `environment` added to ours, in a process group of its own; `stderr`: a file of ours."""
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
        """Wait for its end; return its exit code, 128 + the signal's number if a signal killed it."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group; nothing if it has ended."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def end_within(self, grace_s: float) -> int:
        """Ask it to end; kill it after `grace_s`. Return its exit code."""
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return await self.wait()


def list_descendants(root: int) -> list[int]:
    """Processes below `root`, children first; those that end meanwhile are passed over."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended
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

    Only right when no child of ours may stay: the agent starts nothing but the trainer.
    """
    killed: list[int] = []
    while left := [pid for pid in list_descendants(os.getpid()) if pid not in killed]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed += left
    for pid in killed:  # children of the dead became ours; a grandchild's parent may still be reaping it
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return killed
