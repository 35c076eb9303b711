"""A lock file that one process holds while it runs, with the process's id in it.

The kernel releases the lock when the process dies for any reason; the file stays and has no meaning by itself.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from dips.errors import ConfigError

UNKNOWN = "unknown"  # the holder has not written its pid yet


class PidLock:
    """A lock that is held from construction to `close`."""

    def __init__(self, path: Path, *, busy: str, advice: str) -> None:
        """Take the lock. Raises ConfigError with `busy`, the holder and `advice` if it is held, OSError if it cannot be
        opened.
        """
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
        """Release the lock. Idempotent."""
        self._file.close()


def lock_holder(path: Path) -> str:
    """Return the pid in a held lock file, UNKNOWN if it is not written yet; empty if the lock is not held."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or UNKNOWN
    except FileNotFoundError:
        pass  # never taken
    return ""
