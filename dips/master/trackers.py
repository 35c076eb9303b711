"""Keeps the processes of `master.track` running: one for TensorBoard, one for W&B.

The master itself writes nothing to them and waits for neither: a tracker that is not installed, not reachable or full
is red in the status, and tried again.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from dips.config import TrackSection
from dips.master.children import Child, truncate_log
from dips.protocol.view import TrackView
from dips.tasks import Fail, start_task
from dips.telemetry.logs import Log

PROGRAM = "dips.commands.track_process"  # not imported: it may load what a master may not
AGAIN_S = 60.0  # pause after a process has ended
LOOK_EVERY_S = 10.0  # interval of checks of its log's size
GRACE_S = 5.0  # to write its last numbers
LOG_BYTES = 4 << 20  # of its output, and as much of the former log
REASON_CHARS = 200


class TrackProcesses:
    """One process for each tracker that the run file names."""

    def __init__(self, file: Path, track: TrackSection, directory: Path, log: Log) -> None:
        self._file, self._directory, self._log = file, directory / "track", log
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
        truncate_log(log, LOG_BYTES)
        begin = log.stat().st_size if log.exists() else 0
        command = [sys.executable, "-m", PROGRAM, str(os.getpid()), str(self._file), kind]
        child = Child.start(command, log, whole_group=True)
        try:
            while not await child.wait(LOOK_EVERY_S):
                await asyncio.to_thread(truncate_log, log, LOG_BYTES)
        finally:
            await child.end(GRACE_S)
        said = await asyncio.to_thread(_read_last, log, begin)
        return f"exit code {child.code}: {said or 'it printed nothing'}"


def _read_last(log: Path, begin: int) -> str:
    """Return the last line that the process logged after byte offset `begin`; an error line is preferred."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin if begin <= size else 0, size - (64 << 10)))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")] or lines  # an error is followed by advice
    return said[-1].strip()[:REASON_CHARS] if said else ""
