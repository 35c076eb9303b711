"""File permissions: all files of a daemon are readable by its user only: ledger, journal, snapshots, logs, sockets.

The training command and `master.on_version` run with the umask that this process was started with.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dips.errors import ConfigError
from dips.fsync import make_directory

PRIVATE_MASK = 0o077
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_given = -1  # the umask at the start of this process; -1: it was not changed, as in subprocess


def keep_files_private() -> None:
    """Create new files as 0600 and directories as 0700 from now on; call it once, at the start of a process."""
    global _given
    before = os.umask(PRIVATE_MASK)
    _given = before if _given == -1 else _given


def umask_given() -> int:
    """Return the umask for processes that are not ours, as `subprocess.Popen(umask=…)` takes it."""
    return _given


def make_private_directory(path: Path, key: str) -> None:
    """Make a directory, or remove the permissions of others. Raises ConfigError if it is another user's and
    world-writable.

    The group keeps its permissions in directories of other users: Kubernetes gives volumes to a group (fsGroup).
    """
    make_directory(path)
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid():
        if mode & _OTHERS:
            path.chmod(mode & ~_OTHERS)
    elif mode & stat.S_IWOTH:
        raise ConfigError(
            f"{key}: everybody on this machine may write in {path} (mode {mode:o}), another user's: chmod o-rwx it"
        )


def require_private(path: Path, key: str) -> None:
    """Raise ConfigError if others can read this secret. The group may: Kubernetes mounts Secrets as 0440 with
    fsGroup.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{key}: {path} can be read by everybody on this machine (mode {mode:o}): chmod 600 it")
