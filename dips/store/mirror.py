"""Files below a URL that hold copies of state which must survive a machine: a second disk, NFS, s3://… (fsspec).

A directory path or `file://` needs no other package; other URLs need their fsspec package (s3fs for s3). Must stay
true: `write_file` and `create_file` leave a whole file under its name, or none; of several files the caller writes a
small one last, which marks them as complete. Any error of the backend is raised as FailedMirror.

If a disk is not mounted, nothing must be written below its mount point, and an empty directory there must not be
taken for an empty mirror. So the directory of a local mirror is never created here; and the first write leaves a marker
in the mirror and a note of it in the mirrored directory: from then on a place without this marker is refused.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from dips.errors import ConfigError, Corrupt, CorruptSnapshot, DipsError, FailedDisk, FailedMirror
from dips.files import make_directory, named_in_errors, sync_path, write_durably, write_synced
from dips.ids import VersionId
from dips.store.files import ASIDE, SyncQueue, copy_layer, require_sizes, write_manifest
from dips.store.tensorfile import PIECE_BYTES, OnPiece, reserve_file
from dips.store.version import MANIFEST_FILE, LayerRecord, VersionManifest
from dips.tasks import call_apart

MARKER = "dips-mirror"  # a file in each folder of a mirror, with unique content
SEEN = "mirror.seen"  # a file in the mirrored directory: the mirror's URL and marker
MOST_MARKER_BYTES = 4096
MOST_MANIFEST_BYTES = 64 << 20
FORMAT = 1  # of sealed files
MOST_HEAD_BYTES = 4096  # of the first line of one
MOST_PARTS = 10_000  # of an object in S3
STREAMS = 4  # layers restored at once; each holds some 24 MB, and one connection of an object store has some 100 MB/s
LOOK_S = 1.0  # longest look at the disk of a mirror when its process starts: a mount may hang
TRIES, AGAIN_S = 4, 0.1  # of a request, or of a layer; a store that is busy refuses some
_SECRET = re.compile("//[^/@]*@")  # user and password, which must not be logged
T = TypeVar("T")


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
        self._marker_path, self._home_url = self._full_path(MARKER), self.url
        self._of = of
        self._proven = False  # the marker was checked since the last failure; never for disks, which may be unmounted

    def subfolder(self, name: str) -> MirrorStore:
        """Return the store of a folder in this one, which is of the same mirror and has no marker of its own."""
        below = copy(self)
        below.url, below._base = f"{self.url}/{name}", self._full_path(name)
        return below

    def shares_disk(self) -> bool:
        """Return whether the mirror is on the disk of the mirrored directory and would be lost with it; False if
        unknown, as while a mount hangs.
        """
        if not self._local or (of := self._of) is None:
            return False
        look = call_apart(lambda: os.stat(self._root).st_dev == os.stat(of).st_dev, "mirror-disk")
        try:
            return look.result(LOOK_S)
        except OSError:  # or TimeoutError, which is one
            return False

    def list_names(self, folder: str = "", *, unfinished: bool = False) -> list[str]:
        """Return the names in a folder, ascending; empty if the mirror exists but the folder does not.

        unfinished  those of files instead that were not written to their end: somebody writes them, or has crashed
        """
        with self._translate_errors(folder):
            self._require_mirror()
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._full_path(folder), detail=False)
            except FileNotFoundError:
                return []
            names = (PurePosixPath(path).name for path in found)
            return sorted(name for name in names if name != MARKER and name.startswith(ASIDE) is unfinished)

    def read_file(self, name: str, most: int) -> bytes | None:
        """Return the content of a file, None if it does not exist. Raises FailedMirror if it is longer than `most`
        bytes.
        """
        with self._translate_errors(name):
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
            self._put_path(self._full_path(name), content)

    def create_whole(self, name: str, content: bytes) -> bool:
        """Write a whole file under a name that is free; return False, and change nothing, if it is taken.

        Of several that try at once one succeeds. It may be the caller's own, if an answer was lost.
        """
        with self._translate_errors(name):
            self._require_mirror(marks=True)
            path = self._full_path(name)
            try:
                if self._local:
                    self._link_new(Path(path), content)
                else:
                    self._fs.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
        return True

    @contextmanager
    def create_file(self, name: str, size: int) -> Iterator[IO[bytes]]:
        """Yield a file of `size` bytes to be written piece by piece; it has its name, and is durable if the disk is
        local, when the context ends. Nothing of it is left if an exception ends the context.
        """
        with self._translate_errors(name):
            self._require_mirror(marks=True)
            path = self._full_path(name)
            if not self._local:
                with self._uploaded_file(path, size) as file:
                    yield file
                return
            make_directory(Path(path).parent)
            aside = Path(path).with_name(ASIDE + Path(path).name)
            try:
                with aside.open("wb") as file:
                    yield file
                    with named_in_errors(aside):
                        file.flush()
                        os.fsync(file.fileno())
                aside.rename(path)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise
            sync_path(Path(path).parent)

    @contextmanager
    def _uploaded_file(self, path: str, size: int) -> Iterator[IO[bytes]]:
        """Yield an object that is uploaded in parts, no more than a store takes. Its `close` would upload what is left
        of one that has failed, and the store would keep the parts of an upload that nobody ends.
        """
        file = self._fs.open(path, "wb", block_size=max(PIECE_BYTES, -(-size // MOST_PARTS)))
        try:
            yield file
            file.close()
        except BaseException:
            with suppress(Exception):  # the store fails already; the error that says why is on its way
                file.discard()
            if isinstance(file, AbstractBufferedFile):
                file.closed = True  # so that nothing is uploaded when it is forgotten
            raise

    @contextmanager
    def open_file(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a file to be read piece by piece."""
        more = {} if self._local else {"block_size": PIECE_BYTES}
        with self._translate_errors(name), self._fs.open(self._full_path(name), "rb", **more) as file:
            yield file

    def file_size(self, name: str) -> int | None:
        """Return a file's size in bytes; None if it does not exist."""
        with self._translate_errors(name):
            self._require_mirror()
            self._fs.invalidate_cache()
            try:
                return int(self._fs.size(self._full_path(name)))
            except FileNotFoundError:
                return None

    def list_sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the files in a folder; empty if there is none."""
        return {PurePosixPath(entry["name"]).name: int(entry["size"] or 0) for entry in self._list_entries(folder)}

    def folder_state(self, folder: str) -> str:
        """Return a text that changes with the files in a folder: sizes, times of change, and other data of the
        backend.
        """
        return repr([sorted((key, repr(value)) for key, value in e.items()) for e in self._list_entries(folder)])

    def _list_entries(self, folder: str) -> list[dict[str, Any]]:
        with self._translate_errors(folder):
            self._require_mirror()
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._full_path(folder), detail=True)
            except FileNotFoundError:
                return []
            return sorted(found, key=lambda entry: str(entry["name"]))

    def remove_path(self, name: str) -> None:
        """Remove a file, or a folder with its contents; a missing one is fine."""
        with self._translate_errors(name):
            self._require_mirror()
            self._fs.invalidate_cache()
            if self._fs.exists(self._full_path(name)):
                self._fs.rm(self._full_path(name), recursive=True)

    def remove_files(self, names: Sequence[str]) -> None:
        """Remove files, in an object store by a request for each thousand; missing ones are fine."""
        if not names:
            return
        paths = [self._full_path(name) for name in names]
        with self._translate_errors(names[0]):
            self._require_mirror()
            if self._local:
                for path in paths:
                    Path(path).unlink(missing_ok=True)
                return
            with suppress(FileNotFoundError):
                self._fs.rm(paths)

    def _full_path(self, name: str) -> str:
        return str(PurePosixPath(self._base, name)) if name else self._base

    def _put_path(self, full_path: str, content: bytes) -> None:
        if not self._local:
            self._fs.pipe_file(full_path, content)
            return
        path = Path(full_path)
        make_directory(path.parent)
        write_durably(path, content, path.with_name(ASIDE + path.name))

    @staticmethod
    def _link_new(path: Path, content: bytes) -> None:
        """Make a durable file appear whole under a free name; raise FileExistsError if it is taken."""
        make_directory(path.parent)
        aside = path.with_name(f"{ASIDE}{uuid.uuid4().hex}")
        try:
            write_synced(aside, content)
            os.link(aside, path)
            sync_path(path.parent)
        finally:
            aside.unlink(missing_ok=True)

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
            self._put_path(self._marker_path, marker.encode())
        if marker is not None and seen is None:
            make_directory(self._of)
            write_durably(self._of / SEEN, f"{self._home_url}\n{marker}\n".encode(), self._of / f"{SEEN}.tmp")
        self._proven = marker is not None and not self._local

    def _read_marker(self) -> str | None:
        self._fs.invalidate_cache()
        try:
            content: bytes = self._fs.cat_file(self._marker_path, start=0, end=MOST_MARKER_BYTES)
        except FileNotFoundError:
            return None
        return content.decode(errors="replace").strip()

    def _read_seen(self, path: Path) -> str | None:
        """Return the marker noted for the mirror at this URL; None if it was never seen."""
        try:
            url, _, marker = path.read_text(errors="replace").strip().partition("\n")
        except FileNotFoundError:
            return None
        return marker if url == self._home_url else None

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


def insist(request: Callable[[], T]) -> T:
    """Repeat a request that a busy store refuses; raise FailedMirror if it fails TRIES times in a row."""
    for _ in range(TRIES - 1):
        try:
            return request()
        except FailedMirror:
            time.sleep(AGAIN_S)
    return request()


# ---- sealed files ---------------------------------------------------------------------------------------------------
# Files that are read whole: one line of JSON with format, run, and the length and xxh3-128 of the rest. A file that
# does not match its line is incomplete and is not used.


def seal(run: str, content: bytes) -> bytes:
    """Return the bytes of a sealed file."""
    return _spell_head(run, len(content), xxhash.xxh3_128_hexdigest(content)) + content


def read_sealed(store: MirrorStore, run: str, name: str, most: int) -> bytes | None:
    """Return the content of a sealed file; None if there is none, or it is incomplete. Raise Corrupt if it is of
    another run or format, FailedMirror if the store fails.
    """
    raw = insist(lambda: store.read_file(name, most))
    if raw is None:
        return None
    line, _, content = raw.partition(b"\n")
    whole = _is_whole(line, len(content), xxhash.xxh3_128_hexdigest(content), run, f"{store.url}/{name}")
    return content if whole else None


def write_sealed_file(store: MirrorStore, run: str, name: str, source: Path) -> None:
    """Write a sealed file with the content of a file of this disk, piece by piece."""
    digest = xxhash.xxh3_128()
    with source.open("rb") as file:
        for piece in _read_pieces(file):
            digest.update(piece)
    size = source.stat().st_size
    head = _spell_head(run, size, digest.hexdigest())

    def write() -> None:
        with source.open("rb") as file, store.create_file(name, len(head) + size) as target:
            target.write(head)
            for piece in _read_pieces(file):
                target.write(piece)

    insist(write)


def fetch_sealed_file(store: MirrorStore, run: str, name: str, target: Path) -> bool:
    """Write the content of a sealed file to a file of this disk, piece by piece; return False if there is none, or it
    is incomplete. Raise as `read_sealed`.
    """

    def fetch() -> bool:
        if store.file_size(name) is None:
            return False
        digest, size = xxhash.xxh3_128(), 0
        with store.open_file(name) as source, target.open("wb") as file:
            # No readline: a store's files take no limit there.
            line, _, first = source.read(MOST_HEAD_BYTES).partition(b"\n")
            for piece in chain([first], _read_pieces(source)):
                digest.update(piece)
                with named_in_errors(target):
                    size += file.write(piece)
        return _is_whole(line, size, digest.hexdigest(), run, f"{store.url}/{name}")

    return insist(fetch)


def _read_pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


def _spell_head(run: str, size: int, digest: str) -> bytes:
    return json.dumps({"format": FORMAT, "run": run, "bytes": size, "xxh3": digest}).encode() + b"\n"


def _is_whole(line: bytes, size: int, digest: str, run: str, where: str) -> bool:
    """Return whether content of this size and digest is what its first line says; raise Corrupt if that is of another
    run or format.
    """
    try:
        head = json.loads(line)
        whole = (size, digest) == (head["bytes"], head["xxh3"])
        written_by, of = head["format"], head["run"]
    except (ValueError, KeyError, TypeError):
        return False  # incomplete within its first line
    if not whole:
        return False
    if written_by != FORMAT:
        raise Corrupt(
            f"{where}: expected a mirror of format {FORMAT}, got {written_by!r}; restore it with the Di-PS that "
            "wrote it, or begin a new run from its `dips export`"
        )
    if of != run:
        raise Corrupt(f"{where}: expected the ledger of run {run!r}, got one of {of!r}")
    return True


# ---- copies of versions ---------------------------------------------------------------------------------------------
# Copies a version from a directory into a mirror's folder, and back: `<mirror>/<run>/<slave>/v12@r17/`.
#
# In both directions the bytes are compared with their digests while they are copied, so damaged bytes are not carried
# over. The manifest is written last: a folder without one is an unfinished copy and is not used. One object holds one
# layer, so none is larger than a store takes.


def list_versions(store: MirrorStore) -> list[VersionId]:
    """Return the versions with a folder in the mirror, ascending by round; they may be incomplete."""
    found = []
    for name in insist(store.list_names):
        try:
            found.append(VersionId.parse(name))
        except ValueError:  # not a version's folder
            continue
    return sorted(found, key=lambda v: v.round)


class IncompleteCopy(CorruptSnapshot):
    """A copy that was not made to its end, or is half removed."""


def read_copy(store: MirrorStore, run: str, slave: str, version: VersionId) -> tuple[bytes, VersionManifest]:
    """Return a copy's manifest, as bytes too; raise CorruptSnapshot unless it is of this slave, IncompleteCopy unless
    it is whole.
    """
    where = f"{store.url}/{version}"
    text = insist(lambda: store.read_file(f"{version}/{MANIFEST_FILE}", MOST_MANIFEST_BYTES))
    if text is None:
        raise IncompleteCopy(f"{where} has no manifest: it was not copied to its end")
    manifest = VersionManifest.from_json(text, f"{where}/{MANIFEST_FILE}")
    manifest.require_owner(run, slave, version, where)
    sizes = insist(lambda: store.list_sizes(str(version)))
    try:
        require_sizes(manifest, sizes, where)
    except CorruptSnapshot as error:
        raise IncompleteCopy(str(error)) from error
    return text, manifest


def copy_out(store: MirrorStore, root: Path, version: VersionId, on_piece: OnPiece = lambda _: None) -> None:
    """Copy a version; raise CorruptSnapshot if its bytes do not have their digests, FailedMirror for all other
    failures: then what was copied of it is removed, so that it takes no room from the next one.

    A version that is deleted meanwhile is copied to its end.
    """
    path, folder = root / str(version), str(version)
    try:
        with _linked(path) as kept:
            text = (kept / MANIFEST_FILE).read_bytes()
            manifest = VersionManifest.from_json(text, str(path / MANIFEST_FILE))
            insist(lambda: store.remove_path(folder))
            with _removed_if_failed(store, folder):
                for record in manifest.layers:  # each is tried again: a store that refuses some would never hold all
                    insist(partial(_copy_layer_out, store, kept, path, manifest, record, on_piece))
                _require_copied(store, manifest, folder)
            insist(lambda: store.write_file(f"{folder}/{MANIFEST_FILE}", text))
    except OSError as error:
        raise FailedMirror(f"{path} cannot be copied: {error}") from error


def _require_copied(store: MirrorStore, manifest: VersionManifest, folder: str) -> None:
    try:
        require_sizes(manifest, insist(lambda: store.list_sizes(folder)), f"{store.url}/{folder}")
    except CorruptSnapshot as error:
        raise FailedMirror(f"{error}; it was written just now") from error


@contextmanager
def _removed_if_failed(store: MirrorStore, folder: str) -> Iterator[None]:
    """Remove a folder if an exception ends the context, but not from another mirror, where it may be whole."""
    try:
        yield
    except BaseException:
        with suppress(FailedMirror):  # it fails already
            store.remove_path(folder)
        raise


def _copy_layer_out(
    store: MirrorStore, kept: Path, path: Path, manifest: VersionManifest, record: LayerRecord, on_piece: OnPiece
) -> None:
    with (
        (kept / record.file).open("rb") as source,
        store.create_file(f"{path.name}/{record.file}", record.size) as target,
    ):
        copy_layer(source, target.write, manifest, record, str(path / record.file), on_piece)


@contextmanager
def _linked(path: Path) -> Iterator[Path]:
    """Yield a directory with links to a version's files, so that they stay when the version is deleted; the version's
    own where the file system has no links.
    """
    aside = path.with_name(f"{ASIDE}mirrored-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        try:
            for file in path.iterdir():
                os.link(file, aside / file.name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            yield path
        else:
            yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_own(file: IO[bytes], piece: bytes) -> None:
    """Write to a file of this disk while one of a store is open, which would take its error for the store's."""
    try:
        file.write(piece)
    except OSError as error:
        raise FailedDisk(f"{file.name}: {error.strerror}") from error


def bring_back(
    store: MirrorStore, root: Path, run: str, slave: str, version: VersionId, on_piece: OnPiece = lambda _: None
) -> None:
    """Restore a version into a root, STREAMS layers at a time, after its room is reserved; it is durable on return.

    on_piece  called with the bytes of each piece, by one thread at a time
    Raise CorruptSnapshot if the copy is not complete, FailedMirror if the mirror fails, OSError or FailedDisk if this
    disk does.
    """
    text, manifest = read_copy(store, run, slave, version)
    # Its own name: what a mirror that hangs does late must not meet a write of this version by somebody else.
    aside, queue = root / f"{ASIDE}restored-{version}", SyncQueue()
    one_at_a_time, left, failed = threading.Lock(), iter(manifest.layers), list[Exception]()

    def on_moved(nbytes: int) -> None:
        with one_at_a_time:
            if failed:
                raise failed[0]  # nothing is fetched for a restore that has failed
            on_piece(nbytes)

    def restore_layer(record: LayerRecord) -> None:
        name = f"{version}/{record.file}"
        with (aside / record.file).open("r+b") as target:  # its room is reserved
            with store.open_file(name) as source:
                write = partial(_write_own, target)
                copy_layer(source, write, manifest, record, f"{store.url}/{name}", on_moved)
            target.truncate()

    def restore_layers() -> None:
        try:
            while True:
                with one_at_a_time:
                    record = next(left, None)
                if record is None or failed:
                    return
                insist(partial(restore_layer, record))
                with one_at_a_time:
                    queue.add_file(aside / record.file, record.size)
        except Exception as error:  # noqa: BLE001 (raised where all have ended)
            failed.append(error)

    try:
        aside.mkdir(exist_ok=True)
        for record in manifest.layers:
            reserve_file(aside / record.file, record.size)
        # Daemons, which a mount that hangs does not keep from ending with the process.
        threads = [threading.Thread(target=restore_layers, name="restore", daemon=True) for _ in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        queue.sync_files()
        write_manifest(aside, text)
        aside.rename(root / str(version))
        sync_path(root)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
