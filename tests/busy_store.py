"""An object store that refuses a third of all requests, as fsspec's `busy://`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from dips.errors import ConfigError, FailedMirror

REFUSES_EVERY = 3


class BusyFileSystem(MemoryFileSystem):
    """An object store that refuses a third of all requests: 503, slow down."""

    protocol = "busy"
    store: dict[str, Any] = {}  # noqa: RUF012 (as fsspec has it)
    pseudo_dirs = [""]  # noqa: RUF012
    requests, refused, is_busy = 0, 0, False
    lots: Random | None = None  # draws a third of them: of work with three requests it would always be the same one
    refuses_opens = False  # of files that are written or read by pieces, too

    def _count(self) -> None:
        BusyFileSystem.requests += 1
        number = BusyFileSystem.requests if self.lots is None else self.lots.randrange(REFUSES_EVERY)
        if BusyFileSystem.is_busy and number % REFUSES_EVERY == 0:
            BusyFileSystem.refused += 1
            raise OSError("503 Slow Down")

    def ls(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._count()
        return super().ls(path, *arguments, **options)

    def pipe_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._count()
        return super().pipe_file(path, *arguments, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._count()
        return super().cat_file(path, *arguments, **options)

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        if self.refuses_opens:
            self._count()
        return super()._open(path, *arguments, **options)

    def rm(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._count()
        return super().rm(path, *arguments, **options)


fsspec.register_implementation("busy", BusyFileSystem, clobber=True)


def persist(work: Callable[[], Any]) -> Any:
    """Do it in spite of a store that is busy, as a person does."""
    for _ in range(200):
        try:
            return work()
        except (FailedMirror, ConfigError):
            continue
    return work()
