"""The timeline: what happened when, one JSON object for each line, read by plots and people.

Wall-clock seconds, for display only. A full disk stops the timeline, not the process. A full file becomes `<name>.1`,
replacing the former one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # of a file; the newest 64 to 128 MiB are kept: a week or so of a cluster's inner steps


class Timeline:
    """Appends to one file; safe from several threads."""

    def __init__(self, path: Path, who: str, most_bytes: int = MOST_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._who, self._most_bytes = path, who, most_bytes
        self._file = path.open("a", buffering=1)
        self._size = path.stat().st_size
        self._lock = threading.Lock()
        self.lines_lost = 0

    def record_mark(self, kind: str, **fields: Any) -> None:
        """Write that `kind` happened now."""
        line = json.dumps({"at": time.time(), "who": self._who, "kind": kind, **fields}, default=str)
        with self._lock:
            try:
                if self._size >= self._most_bytes:
                    self._rotate_file()
                self._size += self._file.write(line + "\n")
            except OSError:
                self.lines_lost += 1

    def _rotate_file(self) -> None:
        """Rename the full file to the older one's name and begin a new one."""
        self._path.replace(older_path(self._path))
        self._file.close()
        self._file, self._size = self._path.open("a", buffering=1), 0

    def close(self) -> None:
        self._file.close()


def older_path(path: Path) -> Path:
    """Return the path of the lines before those of `path`, if it was ever full."""
    return path.with_name(path.name + ".1")


def read_marks(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over a timeline's lines, oldest first; an incomplete last line (its writer was killed) is skipped."""
    before = older_path(path).read_text() if older_path(path).exists() else ""
    for line in (before + path.read_text()).splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
