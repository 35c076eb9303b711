"""Files below a URL that hold copies of state which must survive a machine: a second disk, NFS, s3://… (fsspec).

A directory path or `file://` needs no other package; other URLs need their fsspec package (s3fs for s3). Must stay
true: `write_file` leaves a whole file under its name, or none; `create_file` does not guarantee this, so its caller
afterwards writes a small file that marks it as complete. Any error of the backend is raised as FailedMirror.

If a disk is not mounted, nothing must be written below its mount point, and an empty directory there must not be
taken for an empty mirror. So the directory of a local mirror is never created here; and the first write leaves a marker
in the mirror and a note of it in the mirrored directory: from then on a place without this marker is refused.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dips.errors import ConfigError, DipsError, FailedMirror
from dips.files import make_directory, sync_path, write_durably

PIECE_BYTES = 8 << 20  # read and written at a time
ASIDE = ".unfinished-"
MARKER = "dips-mirror"  # a file in each folder of a mirror, with unique content
SEEN = "mirror.seen"  # a file in the mirrored directory: the mirror's URL and marker
MOST_MARKER_BYTES = 4096
_SECRET = re.compile("//[^/@]*@")  # user and password, which must not be logged


class MirrorStore:
    """One folder of a mirror: `<url>/<run>/<owner>/`."""

    def __init__(self, url: str, *folders: str, of: Path | None = None) -> None:
        """Parse the URL without accessing it. Raises ConfigError if it is invalid, or its package is not installed.

        of  the mirrored directory: the mirror must be the one noted there; None: the mirror is only read
        """
        self.url = "/".join((_SECRET.sub("//", url).rstrip("/"), *folders))
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"mirror: {self.url} cannot be used: {error}") from error
        self._local = isinstance(self._fs, LocalFileSystem)
        self._base = str(PurePosixPath(self._root, *folders))
        self._of = of
        self._proven = False  # the marker was checked since the last failure; never for disks, which may be unmounted

    def shares_disk(self) -> bool:
        """Return whether the mirror is on the disk of the mirrored directory and would be lost with it; False if
        unknown.
        """
        try:
            return self._local and self._of is not None and os.stat(self._root).st_dev == os.stat(self._of).st_dev
        except OSError:
            return False

    def list_names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, ascending; empty if the mirror exists but the folder does not."""
        with self._translate_errors(folder):
            self._require_mirror()
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._full_path(folder), detail=False)
            except FileNotFoundError:
                return []
            names = (PurePosixPath(path).name for path in found)
            return sorted(name for name in names if name != MARKER and not name.startswith(ASIDE))

    def read_file(self, name: str, most: int) -> bytes | None:
        """Return the content of a file, None if it does not exist. Raises FailedMirror if it is longer than `most`
        bytes.
        """
        with self._translate_errors(name):
            self._require_mirror()
            size = self.file_size(name)
            if size is None:
                return None
            if size > most:
                raise FailedMirror(f"{self.url}/{name}: expected at most {most} bytes, got {size}")
            content: bytes = self._fs.cat_file(self._full_path(name))
        return content

    def write_file(self, name: str, content: bytes) -> None:
        """Write a whole file under its name, replacing any other; local files are synced and renamed."""
        with self._translate_errors(name):
            self._require_mirror(marks=True)
            self._put_file(name, content)

    @contextmanager
    def create_file(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a file to be written piece by piece; it is durable when the context ends, if the disk is local."""
        with self._translate_errors(name):
            self._require_mirror(marks=True)
            path = self._full_path(name)
            if self._local:
                make_directory(Path(path).parent)
            with self._fs.open(path, "wb", **({} if self._local else {"block_size": PIECE_BYTES})) as file:
                yield file
                if self._local:
                    file.flush()
                    os.fsync(file.fileno())
            if self._local:
                sync_path(Path(path).parent)

    @contextmanager
    def open_file(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a file to be read piece by piece."""
        more = {} if self._local else {"block_size": PIECE_BYTES}
        with self._translate_errors(name), self._fs.open(self._full_path(name), "rb", **more) as file:
            yield file

    def file_size(self, name: str) -> int | None:
        """Return a file's size in bytes; None if it does not exist."""
        with self._translate_errors(name):
            self._fs.invalidate_cache()
            try:
                return int(self._fs.size(self._full_path(name)))
            except FileNotFoundError:
                return None

    def file_state(self, name: str) -> str:
        """Return a text that changes with a file: its size, its time of change, and other data of the backend."""
        with self._translate_errors(name):
            self._fs.invalidate_cache()
            return str(self._fs.ukey(self._full_path(name)))

    def remove_path(self, name: str) -> None:
        """Remove a file, or a folder with its contents; a missing one is fine."""
        with self._translate_errors(name):
            self._fs.invalidate_cache()
            if self._fs.exists(self._full_path(name)):
                self._fs.rm(self._full_path(name), recursive=True)

    def _full_path(self, name: str) -> str:
        return str(PurePosixPath(self._base, name)) if name else self._base

    def _put_file(self, name: str, content: bytes) -> None:
        if not self._local:
            self._fs.pipe_file(self._full_path(name), content)
            return
        path = Path(self._full_path(name))
        make_directory(path.parent)
        write_durably(path, content, path.with_name(ASIDE + path.name))

    def _require_mirror(self, *, marks: bool = False) -> None:
        """Raise FailedMirror unless the mirror exists and is the one written to before; with `marks` mark a new one."""
        if self._local and not Path(self._root).is_dir():
            raise FailedMirror(f"mirror: {self._root} is not there: mount it, or make the directory")
        if self._of is None or self._proven:
            return
        seen, marker = self._read_seen(self._of / SEEN), self._read_marker()
        if seen is not None and seen != marker:
            raise FailedMirror(
                f"{self.url}: expected the mirror whose {MARKER} is {seen}, got {marker or 'a place without one'}: "
                f"mount its disk; if an empty one has replaced it for good, remove {self._of / SEEN}"
            )
        if marker is None and marks:
            marker = uuid.uuid4().hex
            self._put_file(MARKER, marker.encode())
        if marker is not None and seen is None:
            make_directory(self._of)
            write_durably(self._of / SEEN, f"{self.url}\n{marker}\n".encode(), self._of / f"{SEEN}.tmp")
        self._proven = marker is not None and not self._local

    def _read_marker(self) -> str | None:
        self._fs.invalidate_cache()
        try:
            content: bytes = self._fs.cat_file(self._full_path(MARKER), start=0, end=MOST_MARKER_BYTES)
        except FileNotFoundError:
            return None
        return content.decode(errors="replace").strip()

    def _read_seen(self, path: Path) -> str | None:
        """Return the marker noted for the mirror at this URL; None if it was never seen."""
        try:
            url, _, marker = path.read_text(errors="replace").strip().partition("\n")
        except FileNotFoundError:
            return None
        return marker if url == self.url else None

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        """Raise any error of a backend as FailedMirror with the place; errors of Di-PS pass unchanged."""
        try:
            yield
        except DipsError:
            self._proven = False
            raise
        except Exception as error:
            self._proven = False
            raise FailedMirror(f"{self.url}/{name}: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
