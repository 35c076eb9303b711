"""The timeline: what happened when, one JSON object for each line, read by plots, `dips trace` and people.

Wall-clock seconds, for display only. Lines are written on a thread of their own: a disk that is full, or says nothing
for a minute, costs lines and stops nothing else. A full file becomes `<name>.1`, replacing the former one.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import IO, Any

FILE = "timeline.jsonl"  # in the directory of a master, slave or agent
MOST_BYTES = 64 << 20  # of a file; the newest 64 to 128 MiB are kept: a week or so of a cluster's inner steps
MOST_WAITING = 10_000  # lines that wait for the disk; more are lost
CLOSE_S = 2.0  # for writing the last lines when the process ends


class Timeline:
    """Appends to one file; safe from several threads."""

    def __init__(self, directory: Path, run: str, role: str, who: str, most_bytes: int = MOST_BYTES) -> None:
        """Each line has the run and the writer: its role (`master`, `slave` or `cluster`), and its name as `who`."""
        directory.mkdir(parents=True, exist_ok=True)
        self._path, self._most_bytes = directory / FILE, most_bytes
        self._writer = {"run": run, "role": role, "who": who}
        self._open_file()
        torn = self._size > 0 and _is_torn(self._path)
        self._waiting: deque[str] = deque([""] if torn else [])  # ends the torn line, which would take the first along
        self._changed, self._closed, self.lines_lost = threading.Condition(), False, 0
        self._thread = threading.Thread(target=self._write_lines, name="timeline", daemon=True)
        self._thread.start()

    def record_mark(self, kind: str, **fields: Any) -> None:
        """Note that `kind` happened now; waits for no disk. A number that is not finite is null: JSON has no NaN."""
        lacking = {key: None for key, value in fields.items() if isinstance(value, float) and not isfinite(value)}
        line = json.dumps({"at": time.time(), **self._writer, "kind": kind, **fields, **lacking}, default=str)
        with self._changed:
            if self._closed or len(self._waiting) >= MOST_WAITING:
                self.lines_lost += 1
                return
            self._waiting.append(line)
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, unless the disk takes longer than CLOSE_S."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    # ---- on its thread -----------------------------------------------------------------------------------------------

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    break
                line = self._waiting.popleft()
            self._write_line(line)
        with suppress(OSError):  # what is left in its buffer is lost with the disk
            self._file.close()

    def _write_line(self, line: str) -> None:
        try:
            if self._size >= self._most_bytes:
                self._rotate_file()
            elif self._file.closed or not os.fstat(self._file.fileno()).st_nlink:
                self._begin_file()  # somebody has removed it, perhaps with its directory, which is made anew
            self._size += self._file.write(line + "\n")
        except OSError:
            self.lines_lost += 1

    def _rotate_file(self) -> None:
        """Rename the full file to the older one's name and begin a new one; each line tries it again if that fails."""
        with suppress(FileNotFoundError):  # it was renamed before, or a person removed it
            self._path.replace(older_path(self._path))
        self._begin_file()

    def _begin_file(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._open_file()

    def _open_file(self) -> None:
        self._file = self._path.open("a", buffering=1)
        self._size = os.fstat(self._file.fileno()).st_size


def _is_torn(path: Path) -> bool:
    """Whether a file, which is not empty, ends within a line: its writer was killed."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def older_path(path: Path) -> Path:
    """Return the path of the lines before those of `path`, if it was ever full."""
    return path.with_name(path.name + ".1")


def read_marks(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over a timeline's lines, oldest first; what is none is skipped, as where its writer was killed.

    Raise FileNotFoundError if there is none. Its writer may rename the file meanwhile.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(file) for file in _open_files(path)]
        for line in chain.from_iterable(files):
            try:
                mark = json.loads(line)
            except ValueError:
                continue
            if isinstance(mark, dict):
                yield mark


def _open_files(path: Path) -> list[IO[str]]:
    """Open the older file and the newer one, as far as they are there: in a rotation the newer is not, for a moment."""
    newer = older = None
    with suppress(FileNotFoundError):
        newer = path.open(errors="replace")
    with suppress(FileNotFoundError):
        older = older_path(path).open(errors="replace")
    if newer and older and os.path.sameopenfile(newer.fileno(), older.fileno()):  # it was renamed between the two
        older.close()
        older = None
    if not newer and not older:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return [file for file in (older, newer) if file]
