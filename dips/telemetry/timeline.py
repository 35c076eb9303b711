"""The timeline: who did what from when to when, one JSON object a line, read by the plots and by people.

Wall-clock seconds: for looking, never for deciding. A disk that is full stops the timeline, not the process. A file
that is full becomes `<name>.1`, in the place of the one before.
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
        """The full file becomes the older one; the name begins anew."""
        self._path.replace(older_path(self._path))
        self._file.close()
        self._file, self._size = self._path.open("a", buffering=1), 0

    def close(self) -> None:
        self._file.close()


def older_path(path: Path) -> Path:
    """Where the lines before those of `path` are, if it was ever full."""
    return path.with_name(path.name + ".1")


def read_marks(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a timeline, oldest first; a torn last line (its writer was killed) is passed over."""
    before = older_path(path).read_text() if older_path(path).exists() else ""
    for line in (before + path.read_text()).splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
