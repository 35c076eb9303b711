"""Files below a URL, where copies are kept of what must outlive a machine: a second disk, NFS, s3://… (fsspec).

A directory path or `file://` needs nothing besides; other URLs need their fsspec package (s3fs for s3). What must stay
true: `write_file` leaves a whole file under its name, or none; `create_file` promises nothing, so whoever uses it
writes a small file behind it, which says that all is there. The directory of a local mirror is never made here: where
a disk is not mounted, nothing must be written below its mount point. Raises FailedMirror, whatever the backend raised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dips.errors import ConfigError, DipsError, FailedMirror
from dips.fsync import sync_path

PIECE_BYTES = 8 << 20  # read and written at a time
ASIDE = ".unfinished-"
_SECRET = re.compile("//[^/@]*@")  # user and password: never in a log


class MirrorStore:
    """One folder of a mirror: `<url>/<run>/<owner>/`."""

    def __init__(self, url: str, *folders: str) -> None:
        """Raise ConfigError if the URL says nothing, or its package is not installed; nothing is asked of it yet."""
        self.url = "/".join((_SECRET.sub("//", url).rstrip("/"), *folders))
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"mirror: {self.url} cannot be used: {error}") from error
        self._local = isinstance(self._fs, LocalFileSystem)
        self._base = str(PurePosixPath(self._root, *folders))

    def list_names(self, folder: str = "") -> list[str]:
        """The names of what lies in a folder, ascending; empty if the folder is not there, but the mirror is."""
        with self._translate_errors(folder):
            self._require_root()
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._full_path(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(name for name in (PurePosixPath(path).name for path in found) if not name.startswith(ASIDE))

    def read_file(self, name: str, most: int) -> bytes | None:
        """The content of a file, None if it is not there; FailedMirror if it is longer than `most` bytes."""
        with self._translate_errors(name):
            self._require_root()
            size = self.file_size(name)
            if size is None:
                return None
            if size > most:
                raise FailedMirror(f"{self.url}/{name}: expected at most {most} bytes, got {size}")
            content: bytes = self._fs.cat_file(self._full_path(name))
        return content

    def write_file(self, name: str, content: bytes) -> None:
        """Put a whole file under its name, in the place of another; local ones are synced and renamed."""
        with self._translate_errors(name):
            if not self._local:
                self._fs.pipe_file(self._full_path(name), content)
                return
            path = Path(self._full_path(name))
            aside = path.with_name(ASIDE + path.name)
            with self.create_file(str(PurePosixPath(name).with_name(aside.name))) as file:
                file.write(content)
            aside.rename(path)
            sync_path(path.parent)

    @contextmanager
    def create_file(self, name: str) -> Iterator[IO[bytes]]:
        """Write a file piece by piece; it is durable when the context ends, if the disk is local."""
        with self._translate_errors(name):
            self._require_root()
            path = self._full_path(name)
            if self._local:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            with self._fs.open(path, "wb", **({} if self._local else {"block_size": PIECE_BYTES})) as file:
                yield file
                if self._local:
                    file.flush()
                    os.fsync(file.fileno())

    @contextmanager
    def open_file(self, name: str) -> Iterator[IO[bytes]]:
        """Read a file piece by piece."""
        more = {} if self._local else {"block_size": PIECE_BYTES}
        with self._translate_errors(name), self._fs.open(self._full_path(name), "rb", **more) as file:
            yield file

    def file_size(self, name: str) -> int | None:
        """Bytes of a file; None if it is not there."""
        with self._translate_errors(name):
            self._fs.invalidate_cache()
            try:
                return int(self._fs.size(self._full_path(name)))
            except FileNotFoundError:
                return None

    def remove_path(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; a missing one is fine."""
        with self._translate_errors(name):
            self._fs.invalidate_cache()
            if self._fs.exists(self._full_path(name)):
                self._fs.rm(self._full_path(name), recursive=True)

    def _full_path(self, name: str) -> str:
        return str(PurePosixPath(self._base, name)) if name else self._base

    def _require_root(self) -> None:
        if self._local and not Path(self._root).is_dir():
            raise FailedMirror(f"mirror: {self._root} is not there: mount it, or make the directory")

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        """Whatever a backend raises becomes FailedMirror with the place; what our own code raised inside passes."""
        try:
            yield
        except DipsError:
            raise
        except Exception as error:
            raise FailedMirror(f"{self.url}/{name}: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
