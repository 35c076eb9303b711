"""Makes changes to a file system durable, so that they survive a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync_path(path: Path) -> None:
    """Make a file, or a directory's list of files, durable: a new file is durable only after its directory is
    synced.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, each made durable in its parent; an existing directory is fine."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_path(path.parent)


@contextmanager
def write_aside(output: Path) -> Iterator[Path]:
    """Yield a path beside `output` to write to and make durable; it is renamed to `output` if the block succeeds."""
    aside = output.with_name(f".unfinished-{output.name}")
    try:
        make_directory(output.parent)
        yield aside
        aside.rename(output)
        sync_path(output.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes, aside: Path) -> None:
    """Replace a file with new content, written to `aside` in the same directory; durable on return."""
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync_path(path.parent)
