"""Makes what a file system was told last through a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync_path(path: Path) -> None:
    """Make a file, or a directory's list of files, durable: a new file exists only when its directory says so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, each durable in the one above; one that is there is fine."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_path(path.parent)


@contextmanager
def write_aside(output: Path) -> Iterator[Path]:
    """Yield a path beside `output` to write to, and to make durable; only what is whole then gets the name."""
    aside = output.with_name(f".unfinished-{output.name}")
    try:
        make_directory(output.parent)
        yield aside
        aside.rename(output)
        sync_path(output.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes, aside: Path) -> None:
    """Put a whole file in the place of another, by way of `aside` in the same directory; durable on return."""
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync_path(path.parent)
