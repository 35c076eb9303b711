"""Free disk space where the snapshots are, for people; asked on a thread of its own, since a disk may hang."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple

ASKED_EVERY_S = 10.0


class FreeDisk(NamedTuple):
    """Bytes; both 0 while unknown."""

    free: int = 0
    total: int = 0


class DiskRoom:
    """Free disk space for heartbeats, returned at once as last measured."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._room, self._due, self._asking = FreeDisk(), 0.0, False

    def read_room(self) -> FreeDisk:
        """Return the last measurement; if it is old, start a thread to measure anew, unless one is still running."""
        if not self._asking and time.monotonic() >= self._due:
            self._asking = True
            threading.Thread(target=self._ask_disk, name="disk-room", daemon=True).start()
        return self._room

    def _ask_disk(self) -> None:
        try:
            found = shutil.disk_usage(self._directory)
            self._room = FreeDisk(found.free, found.total)
        except OSError:
            self._room = FreeDisk()  # its snapshots will report the reason
        finally:
            self._due, self._asking = time.monotonic() + ASKED_EVERY_S, False
