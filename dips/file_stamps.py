"""Detection of changes to a file that is checked regularly: one stamp, for configurations and certificates."""

from __future__ import annotations

from pathlib import Path

FileStamp = tuple[int, int, int]


def stamp_file(path: Path) -> FileStamp:
    """Return a value that changes with the file, also if a link is redirected (a ConfigMap); a missing file has a
    stamp, too.
    """
    try:
        stat = path.stat()
    except (OSError, ValueError):  # ValueError: a name with a NUL
        return 0, 0, 0
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
