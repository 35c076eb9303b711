"""The timeline: who did what from when to when, one JSON object a line, read by the plots and by people.

Wall-clock seconds: for looking, never for deciding. A disk that is full stops the timeline, not the process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Timeline:
    """Appends to one file; safe from several threads."""

    def __init__(self, path: Path, who: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._who = who
        self._lock = threading.Lock()
        self.lines_lost = 0

    def mark(self, kind: str, **fields: Any) -> None:
        """Write that `kind` happened now."""
        line = json.dumps({"at": time.time(), "who": self._who, "kind": kind, **fields}, default=str)
        with self._lock:
            try:
                self._file.write(line + "\n")
            except OSError:
                self.lines_lost += 1

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a timeline; a torn last line (its writer was killed) is passed over."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
