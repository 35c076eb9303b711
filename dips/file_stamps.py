"""Whether a file that is looked at again and again has changed: one stamp, for configurations and certificates."""

from __future__ import annotations

from pathlib import Path

FileStamp = tuple[int, int, int]


def stamp_file(path: Path) -> FileStamp:
    """Changes whenever the file does, also if a link leads to another (a ConfigMap); a missing file has one, too."""
    try:
        stat = path.stat()
    except (OSError, ValueError):  # ValueError: a name with a NUL
        return 0, 0, 0
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
