"""The training command as a process group: started, ended, cleaned up; the end of its standard error."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dips.files import umask_given
from dips.printable import make_printable, shorten

# ---- error tail -----------------------------------------------------------------------------------------------------
# The trainer writes to a pipe instead of our standard error; a thread copies it, so that a slow terminal blocks the
# trainer and not the agent.
#
# When one rank fails, the others fail as a consequence, with errors of their own (a closed connection), and usually
# print last. torchrun says which rank failed first; if it did not notice in time, an error that is no such consequence
# is used.


TAIL_BYTES = 1 << 18  # kept: a traceback of each rank of a host, and torchrun's report after them
PIECE_BYTES = 65536
LINE_CHARS = 160  # at most shown of a line
CAUSE_CHARS = 240  # at most of the one that says why: our own errors end with what to do
PAST_CHARS = 4 * LINE_CHARS  # read per line that is shown
END_S = 1.0  # for the rest of the output, after all processes of the trainer are gone
# The last line of a Python traceback, as torch prints it for a rank; torchrun's own traceback after it has no cause.
RAISED = re.compile(
    r"^(?:\[rank(\d+)\]: ?)?((?:dips\.errors\.\w+|(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration))\b.*)$",
    re.MULTILINE,
)
OF_TORCHRUN = "torch.distributed.elastic"
# torchrun's report: the rank whose end it saw first, and the signal that killed it (a negative exit code), if one did.
ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank +: (\d+) .*?exitcode +: (?:-(\d+)|\d)", re.DOTALL
)
OF_OTHERS = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|DistNetworkError|gloo|Gloo|NCCL|ncclRemoteError|DistBackendError"
    r"|not all \d+ ranks reached",
)
WARNED = re.compile(r":\d+: \w*Warning: ")  # Python prints the source line below it
BY_SIGNAL = range(129, 128 + signal.NSIG)  # exit codes that mean a signal; 255 is exit(-1)
SILENT = {signal.SIGKILL: " (out of memory?)", signal.SIGTERM: ""}  # a process ended by these prints no reason


class ErrorTail:
    """The standard error of one launch: pass `writer` to the process, then call `close_writer`, and `finish` after its
    end.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._copy, name="trainer-stderr", daemon=True)

    def close_writer(self) -> None:
        """Close our copy of the pipe's write end, so that the pipe ends with the process, and start copying."""
        os.close(self.writer)
        self._thread.start()

    def last_lines(self, most: int) -> tuple[str, ...]:
        """Return the newest complete lines so far that contain words, at most `most`."""
        text = bytes(self._tail[-most * PAST_CHARS :]).decode(errors="replace")
        return tuple(make_printable(line)[:LINE_CHARS] for line in _list_spoken(text)[-most:])

    def finish(self) -> str:
        """Return the probable cause of the process's end in one line; empty if nothing was printed."""
        self._thread.join(END_S)
        return find_cause(bytes(self._tail).decode(errors="replace"))

    def _copy(self) -> None:
        while piece := os.read(self._reader, PIECE_BYTES):
            self._tail += piece
            del self._tail[:-TAIL_BYTES]
            _pass_on(piece)
        os.close(self._reader)


def _pass_on(piece: bytes) -> None:
    """Write to our own standard error; if that is closed, the trainer goes on without it."""
    while piece:
        try:
            piece = piece[os.write(2, piece) :]
        except BlockingIOError:  # a terminal that another program has made non-blocking
            select.select([], [2], [])
        except OSError:
            return


def find_cause(text: str) -> str:
    """Return the error of the rank that failed first, or the signal that killed it; without either, the last line of
    text.
    """
    raised = [found for found in RAISED.findall(text) if not found[1].startswith(OF_TORCHRUN)]
    first = ROOT_CAUSE.search(text)
    if first is not None and first[2]:
        return f"rank {first[1]} was {describe_signal(int(first[2]))}"
    lines = [line for rank, line in raised if first is not None and rank == first[1]]
    if not lines or OF_OTHERS.search(lines[-1]):
        lines = [line for _, line in raised if not OF_OTHERS.search(line)] or lines or [line for _, line in raised]
    spoken = _list_spoken(text)
    said = [line for line in spoken if line.startswith("error: ")]  # by a command of ours, with advice after it
    return shorten((lines or said or spoken or [""])[-1].strip(), CAUSE_CHARS)


def describe_signal(number: int) -> str:
    """Describe a signal's effect and its usual reason."""
    try:
        named = signal.Signals(number)
    except ValueError:
        return f"killed by signal {number}"
    return f"killed by {named.name}{SILENT.get(named, '')}"


def _list_spoken(text: str) -> list[str]:
    lines = text.splitlines()
    before = ["", *lines]
    return [
        line.strip()
        for line, above in zip(lines, before, strict=False)
        if any(c.isalnum() for c in line) and not (line[0].isspace() and WARNED.search(above))
    ]


# ---- trainer --------------------------------------------------------------------------------------------------------
# The training command as a process group: started, ended, and cleaned up (docs/rationale.md#27).
#
# torchrun puts its workers into separate sessions, so SIGKILL to its group leaves them running. The agent is their
# subreaper: they become its children and are killed here, so that two launches never overlap.


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
        """Send a signal to the process group; does nothing if the process has ended, or is another user's (sudo)."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
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
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()  # a name is any 15 bytes
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, at = [], [root]
    while at:
        below = children.get(at.pop(), [])
        found += below
        at += below
    return found


UNDEAD_S = 10.0  # between two looks of `give_up` at processes that SIGKILL has not ended
REAP_S = 0.02


async def kill_leftovers(give_up: Callable[[Sequence[int]], bool]) -> list[int]:
    """Kill every process below this one and wait until they are gone; return their ids.

    Only valid if no child may survive: the agent starts nothing but the trainer.

    give_up  called every UNDEAD_S with those that are not gone, as the kernel keeps what waits for a device or a file
             system, and those of another user (sudo) cannot be killed; returns whether they are waited for no longer
    """
    killed: list[int] = []
    while left := [pid for pid in list_descendants(os.getpid()) if pid not in killed]:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed += left
    undead, loop = killed, asyncio.get_running_loop()
    look_at = loop.time() + UNDEAD_S
    while undead := [pid for pid in undead if not _is_reaped(pid)]:
        if loop.time() >= look_at:
            if give_up(undead):
                break
            look_at = loop.time() + UNDEAD_S
        await asyncio.sleep(REAP_S)
    return killed


def _is_reaped(pid: int) -> bool:
    """Reap a process below this one if it is a child that has ended; return whether it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # a grandchild becomes our child when its parent has ended, unless that has reaped it
        return pid not in list_descendants(os.getpid())


ORPHANS_S = 60.0  # between two looks for what the trainer has left and has ended


def reap_orphans(besides: int) -> None:
    """Reap children of this process that have ended, except `besides`, whose end is awaited elsewhere. What loses its
    parent becomes a child of its subreaper, and counts as a process until that has reaped it.
    """
    with suppress(ChildProcessError):  # there is none
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != besides:
            os.waitpid(ended.si_pid, 0)


class CommandLaunch:
    """One launch of the training command: its process, the end of its standard error, and what it leaves running."""

    def __init__(self, process: TrainerProcess, tail: ErrorTail) -> None:
        self._process, self._tail = process, tail
        self.pid, self.end_within = process.pid, process.end_within
        self.last_lines = tail.last_lines

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> CommandLaunch:
        """Start `command` with `environment` added to ours."""
        tail = ErrorTail()
        try:
            return cls(await TrainerProcess.start(command, environment, tail.writer), tail)
        finally:
            tail.close_writer()

    async def wait(self) -> int:
        """Wait as `TrainerProcess.wait`; reap meanwhile what the launch has left."""
        ended = asyncio.create_task(self._process.wait())
        try:
            while not (await asyncio.wait({ended}, timeout=ORPHANS_S))[0]:
                reap_orphans(self.pid)
            return ended.result()
        finally:
            ended.cancel()

    async def kill_leftovers(self, give_up: Callable[[Sequence[int]], bool]) -> int:
        """Kill what the launch has left after its end, as `kill_leftovers` does; return the number of processes."""
        return len(await kill_leftovers(give_up))

    async def find_cause(self) -> str:
        """Return the probable cause of the launch's end in one line; empty if it printed nothing."""
        return await asyncio.to_thread(self._tail.finish)
