"""Processes that the master runs for its operator: `master.on_version` for each n-th version, trackers of metrics."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from dips.config import OnVersionSection, TrackSection
from dips.ids import VersionId
from dips.master.supervisor import BoundedLogs, Child
from dips.protocol.records import Record, VersionResult
from dips.protocol.view import TrackView, VersionProcessView
from dips.tasks import Fail, start_task
from dips.telemetry.logs import Log

TAIL_BYTES = 64 << 10  # of a process's log, read for its last lines
REASON_CHARS = 200
LAUNCH = "dips.client.agent.launch"  # not imported, like the programs: it may load what a master may not


def _spell_command(program: str, *words: str) -> list[str]:
    """Return the command of a program of ours that the kernel signals when this process dies for any reason."""
    return [sys.executable, "-m", LAUNCH, str(os.getpid()), "--", sys.executable, "-m", program, *words]


def _find_end(log: Path) -> int:
    """Return the byte offset at which the next process's output will begin."""
    return log.stat().st_size if log.exists() else 0


def _read_lines(log: Path, begin: int) -> list[str]:
    """Return the last lines that a process logged after byte offset `begin`."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin if begin <= size else 0, size - TAIL_BYTES))
        text = file.read(TAIL_BYTES).decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


# ---- trackers -------------------------------------------------------------------------------------------------------
# Keeps the processes of `master.track` running: one for TensorBoard, one for W&B.
#
# The master itself writes nothing to them and waits for neither: a tracker that is not installed, not reachable or full
# is red in the status, and tried again.


TRACKER_PROGRAM = "dips.commands.track_process"
AGAIN_S = 60.0  # pause after a process has ended
TRACKER_LOOKS_S = 10.0  # interval of checks of its log's size
GRACE_S = 5.0  # to write its last numbers
TRACKER_LOG_BYTES = 4 << 20  # of its output, and as much of the former log


class TrackProcesses:
    """One process for each tracker that the run file names."""

    def __init__(self, file: Path, track: TrackSection, directory: Path, log: Log) -> None:
        self._file, self._directory, self._log = file, directory / "track", log
        self._logs = BoundedLogs(log)
        self._kinds = [kind for kind in ("tensorboard", "wandb") if getattr(track, kind) is not None]
        self._reasons = dict.fromkeys(self._kinds, "")  # why the last one ended; empty: one runs
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, fail: Fail) -> None:
        """Start the processes; `fail` is called with exceptions of their tasks."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._tasks = [start_task(self._run_forever(kind), fail, f"track {kind}") for kind in self._kinds]

    async def stop(self) -> None:
        """Give the processes GRACE_S to write their last numbers, and return when they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def view(self) -> TrackView:
        """Return the trackers in use, and why some fail."""
        reasons = [f"{kind}: {reason}" for kind, reason in self._reasons.items() if reason]
        return TrackView(tuple(self._kinds), bool(reasons), "; ".join(reasons))

    async def _run_forever(self, kind: str) -> None:
        while True:
            try:
                self._reasons[kind] = await self._run_process(kind)
            except OSError as error:
                self._reasons[kind] = f"cannot be started: {error.strerror or error}"
            self._log.warning("track ended", to=kind, why=self._reasons[kind], again_in_s=AGAIN_S)
            await asyncio.sleep(AGAIN_S)
            self._reasons[kind] = ""

    async def _run_process(self, kind: str) -> str:
        """Run a process; return why it has ended, which it should not."""
        log = self._directory / f"{kind}.log"
        await self._logs.bound_log(log, TRACKER_LOG_BYTES)
        begin = _find_end(log)
        child = Child.start(_spell_command(TRACKER_PROGRAM, str(self._file), kind), log, whole_group=True)
        try:
            while not await child.wait(TRACKER_LOOKS_S):
                await self._logs.bound_log(log, TRACKER_LOG_BYTES)
        finally:
            await child.end(GRACE_S)
        said = await asyncio.to_thread(_read_last, log, begin)
        return f"exit code {child.code}: {said or 'it printed nothing'}"


def _read_last(log: Path, begin: int) -> str:
    """Return the last line that the process logged after byte offset `begin`; an error line is preferred."""
    lines = _read_lines(log, begin)
    said = [line for line in lines if line.startswith("error: ")] or lines  # an error is followed by advice
    return said[-1].strip()[:REASON_CHARS] if said else ""


# ---- on version -----------------------------------------------------------------------------------------------------
# Runs the command of `master.on_version` for every n-th version, for example to evaluate, export or upload it.
#
# One process at a time, oldest version first, each with a time limit, after which its process group is killed. The last
# line that it prints, JSON with numbers, is written into the ledger, or the reason of its failure: a version whose
# process has ended has its row, even if a master died meanwhile, and the next one is found in the ledger. Nothing waits
# for it: the Coordinator does not know of it. `keep_every` keeps the snapshots that are still to be processed.


LONGEST_S = 86_400.0  # of one process, which is then killed; a command may be bounded by `timeout 1h …`
LOOK_EVERY_S = 2.0  # interval of checks for a new version and of the log's size
RETRY_S = 60.0  # after the ledger could not be read or written; the process is run again
KILLED_S = 10.0  # until a killed process is gone
LOG_BYTES = 16 << 20  # of the processes' output, and as much of the former log
MOST_NUMBERS = 32  # of one version; more are left out
NAME_CHARS = 64
PROGRAM = "dips.commands.version_process"


class VersionProcesses:
    """The processes. `find_due` returns the oldest n-th version without a result; `write` makes records durable."""

    def __init__(
        self,
        file: Path,
        config: OnVersionSection,
        directory: Path,
        find_due: Callable[[int], Awaitable[VersionId | None]],
        write: Callable[[Sequence[Record]], Awaitable[None]],
        log: Log,
    ) -> None:
        self._file, self._config, self._find_due, self._write, self._log = file, config, find_due, write, log
        self._directory, self._logs = directory / "on_version", BoundedLogs(log)
        self._clock = asyncio.get_running_loop().time
        self._running: tuple[VersionId, float] | None = None
        self._last: VersionResult | None = None
        self._failed = ""
        self._child: Child | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, fail: Fail) -> None:
        """Begin to process versions; `fail` is called with exceptions of this task."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._tasks = [start_task(self._run_forever(), fail, "on_version")]

    async def stop(self) -> None:
        """Kill the running process, whose version stays due, and return when it has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._child is not None:
            await self._child.wait(KILLED_S)

    def view(self) -> VersionProcessView:
        """Return the running version, since when, and how the last one ended."""
        running, last = self._running, self._last
        return VersionProcessView(
            every=self._config.every,
            running=str(running[0]) if running else None,
            running_s=self._clock() - running[1] if running else None,
            version=str(last.version) if last else None,
            numbers=dict(last.numbers) if last else {},
            red=bool(self._failed or (last and not last.ok)),
            reason=self._failed or (last.reason if last else ""),
        )

    async def _run_forever(self) -> None:
        while True:
            try:
                while (version := await self._find_due(self._config.every)) is not None:
                    await self._process_version(version)
                self._failed, pause_s = "", LOOK_EVERY_S
            except Exception as error:  # noqa: BLE001 (whatever it is, training goes on; it is shown and tried again)
                self._failed, pause_s = repr(error), RETRY_S
                self._log.error("on_version failed", why=repr(error), again_in_s=RETRY_S)
            await asyncio.sleep(pause_s)

    async def _process_version(self, version: VersionId) -> None:
        begun = self._clock()
        self._running = (version, begun)
        try:
            ok, reason, numbers = await self._run_process(version)
        finally:
            self._running = None
        result = VersionResult(version, ok, reason, numbers, self._clock() - begun)
        await self._write([result])
        self._last = result
        if ok:
            self._log.info("on_version ended", version=str(version), ok=True, numbers=dict(numbers))
        else:
            self._log.warning("on_version ended", version=str(version), ok=False, reason=reason)

    async def _run_process(self, version: VersionId) -> tuple[bool, str, tuple[tuple[str, float], ...]]:
        """Return (whether it succeeded, why not, its numbers)."""
        log = self._directory / "output.log"
        await self._logs.bound_log(log, LOG_BYTES)
        begin = _find_end(log)
        try:
            words = str(self._file), str(version), str(self._directory / "model.safetensors"), "--"
            command = _spell_command(PROGRAM, *words, *self._config.command)
            child = self._child = Child.start(command, log, cwd=self._file.parent, whole_group=True)
        except OSError as error:
            return False, f"cannot be started: {error.strerror or error}", ()
        try:
            in_time = await self._wait_bounded(child, log)
        finally:
            child.kill_group()
        await child.wait()
        lines = await asyncio.to_thread(_read_lines, log, begin)
        if not in_time:
            return False, f"not done after {LONGEST_S:g} s: killed", ()
        if child.code != 0:
            last = lines[-1][:REASON_CHARS] if lines else "it printed nothing"
            return False, f"exit code {child.code}: {last}", ()
        return True, "", read_numbers(lines[-1] if lines else "")

    async def _wait_bounded(self, child: Child, log: Path) -> bool:
        """Wait for its end; return whether it ended in time."""
        until = self._clock() + LONGEST_S
        while (left := until - self._clock()) > 0:
            if await child.wait(min(left, LOOK_EVERY_S)):
                return True
            await self._logs.bound_log(log, LOG_BYTES)
        return False


def read_numbers(line: str) -> tuple[tuple[str, float], ...]:
    """Return the finite numbers of a line that is a JSON object, by name; none for any other line."""
    try:
        told = json.loads(line)
    except ValueError:
        return ()
    if not isinstance(told, dict):
        return ()
    named = [(k[:NAME_CHARS], v) for k, v in told.items() if isinstance(v, int | float) and not isinstance(v, bool)]
    return tuple((name, float(v)) for name, v in named if abs(v) < 1e300)[:MOST_NUMBERS]
