"""A file that one process holds for as long as it lives, and that says which process that is.

The kernel lets go of it when the process dies, however it dies; the file stays and means nothing by itself.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from dips.errors import ConfigError

UNKNOWN = "unknown"  # the holder has not written its pid yet


class PidLock:
    """Held from construction to `close`."""

    def __init__(self, path: Path, *, busy: str, advice: str) -> None:
        """Take the lock, or raise ConfigError: `busy`, its holder, `advice`; OSError if the file cannot be opened."""
        self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            pid = self._file.read().strip() or UNKNOWN
            self._file.close()
            raise ConfigError(f"{busy} (pid {pid}): {advice}") from error
        except OSError:
            self._file.close()
            raise
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def close(self) -> None:
        """Let go of the lock; twice is fine."""
        self._file.close()


def lock_holder(path: Path) -> str:
    """Return the pid of the process that holds a lock file, UNKNOWN if it has not written it; empty if nobody does."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or UNKNOWN
    except FileNotFoundError:
        pass  # never taken
    return ""
