"""How much room is left where the snapshots lie, for people; asked beside everything else, since a disk may hang."""

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
    """Asked by heartbeats, answers at once with what was found last."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._room, self._due, self._asking = FreeDisk(), 0.0, False

    def read_room(self) -> FreeDisk:
        """The newest answer; a thread asks anew if it is old. One that hangs is not joined by others."""
        if not self._asking and time.monotonic() >= self._due:
            self._asking = True
            threading.Thread(target=self._ask_disk, name="disk-room", daemon=True).start()
        return self._room

    def _ask_disk(self) -> None:
        try:
            found = shutil.disk_usage(self._directory)
            self._room = FreeDisk(found.free, found.total)
        except OSError:
            self._room = FreeDisk()  # its snapshots will say why
        finally:
            self._due, self._asking = time.monotonic() + ASKED_EVERY_S, False
