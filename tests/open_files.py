"""Which files this process has open, for tests that see that none is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def list_open_files() -> set[tuple[int, str]]:
    """Each descriptor and what it leads to: a path, or the number of a pipe or socket."""
    found = set[tuple[int, str]]()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            found.add((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
    return found


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """What closes meanwhile is no matter: sockets of earlier tests go when they are collected."""
    before = list_open_files()
    yield
    assert not list_open_files() - before
