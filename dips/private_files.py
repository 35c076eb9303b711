"""What a daemon writes is its user's alone: ledger, journal, snapshots, logs, sockets.

The training command and `master.on_version` are not ours: they get back the umask that we were started with.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dips.errors import ConfigError
from dips.fsync import make_directory

PRIVATE_MASK = 0o077
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_given = -1  # the umask that we were started with; -1: ours was not changed, as subprocess spells it


def keep_files_private() -> None:
    """From now on new files are 0600 and directories 0700; once, at the start of a process."""
    global _given
    before = os.umask(PRIVATE_MASK)
    _given = before if _given == -1 else _given


def umask_given() -> int:
    """For processes that are not ours; as `subprocess.Popen(umask=…)` takes it."""
    return _given


def make_private_directory(path: Path, key: str) -> None:
    """Make it, or take it from all others; raise ConfigError if everybody may write in it and it is not ours to change.

    What belongs to another user is left to a group: Kubernetes gives volumes to one (fsGroup).
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
    """Raise ConfigError if others may read this secret. A group may: Kubernetes mounts Secrets as 0440, of fsGroup."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{key}: {path} can be read by everybody on this machine (mode {mode:o}): chmod 600 it")
