"""One process that the master supervises, held by its pidfd, so that a pid that the kernel reuses is not mistaken for
it.

It may be a child, or a process that a former master started and this one adopted; either way its end is noticed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dips.private_files import umask_given


class Child:
    """A process that is alive, or whose end was noticed. Must be created inside the event loop."""

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None, *, whole_group: bool = False) -> None:
        """With `whole_group` the rest of its process group is killed when it ends, before its pid can be reused.

        Raise ProcessLookupError if no process has this pid.
        """
        self.pid, self.adopted, self._popen, self._whole_group = pid, popen is None, popen, whole_group
        self._fd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_death)

    @classmethod
    def start(cls, command: Sequence[str], log: Path, cwd: Path | None = None, *, whole_group: bool = False) -> Child:
        """Start a process in its own session that appends to `log`; raise OSError if it cannot be started."""
        with log.open("ab") as out:  # its own descriptor: the process outlives us
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=cwd,
                start_new_session=True,
                umask=umask_given(),
            )
        try:
            return cls(popen.pid, popen, whole_group=whole_group)
        except OSError:  # no descriptor is left to watch it with
            popen.kill()
            popen.wait()
            raise

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs, and for a process that is not our child."""
        return self._popen.poll() if self._popen is not None else None

    def read_moved_bytes(self) -> int:
        """Return the bytes that it has read and written since its start, files and sockets; 0 if unknown."""
        try:
            lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
            counts = dict(line.split(": ", 1) for line in lines)
            return int(counts["rchar"]) + int(counts["wchar"])
        except (OSError, KeyError, ValueError):
            return 0

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def kill_group(self) -> None:
        """Kill the process and its process group, which it must lead, unless it has ended."""
        if self.alive:  # not reaped yet, so its pid is not reused
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; return whether it ended within `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return not self.alive

    async def end(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s`; return when it has ended."""
        self.send_signal(signal.SIGTERM)
        if not await self.wait(grace_s):
            self.send_signal(signal.SIGKILL)
            await self.wait()

    def _on_death(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        if self._whole_group:
            self.kill_group()
        if self._popen is not None:
            self._popen.wait()
        self._ended.set()

    def stop_watching(self) -> None:
        """Stop watching; the process goes on."""
        if self.alive:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)


def truncate_log(log: Path, most_bytes: int) -> None:
    """Limit a log that another process appends to: above the size it is copied to `<log>.1`, then emptied.

    Lines that are written between the two are lost, which is acceptable for a log.
    """
    with suppress(FileNotFoundError):
        if log.stat().st_size > most_bytes:
            shutil.copyfile(log, log.with_name(log.name + ".1"))
            os.truncate(log, 0)
