"""The last process that held a slave's directory, as proof to the master that the next one there may replace it.

The master takes another process of a slave that was heard just now for a rival. A process that holds the directory's
lock knows that the former one has ended, and proves that it holds the directory by the former nonce, which no other
peer knows: so a slave that is restarted at once need not wait. A copy of the directory proves nothing, since its lock
is another file. Not fsynced: after a reboot the old process has been silent for long enough.
"""

from __future__ import annotations

import json
from pathlib import Path

from dips.telemetry.logs import Log

FILE = "process.json"
NONCE_CHARS = 64  # most characters; ours have 32


class LastProcess:
    """The file of one directory, owned by the holder of the directory's lock."""

    def __init__(self, directory: Path, lock: Path, log: Log) -> None:
        self._path, self._lock, self._log = directory / FILE, lock, log
        self._kept = ""

    def read_nonce(self) -> str:
        """Return the nonce of the last process here that the master gave an incarnation; empty if unknown."""
        try:
            found = json.loads(self._path.read_text())
            nonce, inode = found["nonce"], found["lock_inode"]
            ours = isinstance(nonce, str) and len(nonce) <= NONCE_CHARS and inode == self._lock.stat().st_ino
            return nonce if ours else ""
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._log.warning("last_process_not_read", path=str(self._path), error=str(error))
            return ""

    def keep_nonce(self, nonce: str) -> None:
        """Keep this process's nonce, once it has an incarnation; on a full disk its successor waits two heartbeats."""
        if nonce == self._kept:
            return
        self._kept = nonce
        aside = self._path.with_suffix(".new")
        try:
            aside.write_text(json.dumps({"nonce": nonce, "lock_inode": self._lock.stat().st_ino}))
            aside.replace(self._path)
        except OSError as error:
            self._log.warning("last_process_not_written", path=str(self._path), error=str(error))
