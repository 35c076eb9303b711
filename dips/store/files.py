"""A root on a local disk: writing versions and reading them verified, staging, promoting and deleting them.

A version is written aside, every file and directory is fsynced, and it is renamed: it is whole, or it is not there.
Every defect raises CorruptSnapshot with the file's name, and OSError passes unchanged.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from dips.dataclass import dataclass
from dips.errors import ConfigError, CorruptSnapshot
from dips.files import named_in_errors, sync_path, write_synced
from dips.ids import GENESIS, VersionId
from dips.protocol.manifest import Manifest
from dips.store.tensorfile import F32, PIECE_BYTES, SYNC_BYTES, OnPiece, map_floats, reserve_file, write_behind
from dips.store.version import (
    MANIFEST_FILE,
    MOMENTUM,
    THETA,
    LayerRecord,
    VersionManifest,
    digest_of,
    layer_file,
    layer_header,
    split_layer,
    text_digest,
    version_of,
)

ASIDE = ".unfinished-"  # prefix of incomplete or half-removed versions, which are removed when the slave starts
HALF_REMOVED = f"{ASIDE}old-"  # of the latter, which go with the next deletion, too
LISTING_BYTES = 4096  # for each parameter in a manifest: name, shape, digests; an upper bound
SYNC_THREADS = 8  # files that are synced at a time
Owner = tuple[str, str, int]  # run, slave and incarnation

# ---- writing --------------------------------------------------------------------------------------------------------


class SyncQueue:
    """Files that are written and not on the disk yet. They are synced side by side: one after another, each would wait
    for a commit of the file system's journal of its own.
    """

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._nbytes = 0

    def add_file(self, path: Path, nbytes: int) -> None:
        """Take a file; with more than SYNC_BYTES in all they are synced now, so that the last fsync is short."""
        self._paths.append(path)
        self._nbytes += nbytes
        if self._nbytes >= SYNC_BYTES:
            self.sync_files()

    def sync_files(self) -> None:
        """Make all files durable; raise OSError if one of them fails."""
        if self._paths:
            with ThreadPoolExecutor(min(SYNC_THREADS, len(self._paths)), "sync") as threads:
                list(threads.map(sync_path, self._paths))
        self._paths.clear()
        self._nbytes = 0


def reserve_version(
    folder: Path, run: str, version: VersionId, model: Manifest, layers: Iterable[int], *, momentum: bool = True
) -> None:
    """Reserve the disk space of a version in the files that `write_version` fills; raise OSError if there is none."""
    folder.mkdir(exist_ok=True)
    listed = 1
    for index in layers:
        layer = model.layers[index]
        header = layer_header(run, version, layer, momentum=momentum)
        reserve_file(folder / layer_file(index), len(header) + (2 if momentum else 1) * layer.nbytes)
        listed += len(layer.parameters)
    reserve_file(folder / MANIFEST_FILE, LISTING_BYTES * listed)


def write_version(
    folder: Path,
    owner: Owner,
    version: VersionId,
    model: Manifest,
    layers: Iterable[int],
    flat: Iterable[F32],
    on_piece: OnPiece = lambda _: None,
    *,
    momentum: bool = True,
) -> str:
    """Fill a directory with a version, durably; return the digest of its manifest.

    flat      θ and m of each layer, or θ alone without `momentum`, in the order of `layers`; an array may be reused
              when the next one is asked for
    on_piece  called with the bytes of each piece written; its exceptions end the write
    Raises    OSError; the directory then holds no version
    """
    run, queue, arrays = owner[0], SyncQueue(), iter(flat)
    records = list[LayerRecord]()
    for index in layers:
        layer, path, digests = model.layers[index], folder / layer_file(index), list[str]()
        parts = (next(arrays) for _ in range(2 if momentum else 1))
        header = layer_header(run, version, layer, momentum=momentum)
        numel = (2 if momentum else 1) * layer.numel
        size = write_behind(path, header, numel, _digest_arrays(parts, digests), on_piece)
        queue.add_file(path, size)
        records.append(LayerRecord(index, layer, digests[0], digests[1] if momentum else "", size))
    queue.sync_files()
    return write_manifest(folder, make_manifest(owner, version, model, records).to_json())


def make_manifest(owner: Owner, version: VersionId, model: Manifest, records: Iterable[LayerRecord]) -> VersionManifest:
    return VersionManifest(*owner, version, model.digest, len(model.layers), tuple(records))


def write_manifest(folder: Path, text: bytes) -> str:
    """Write the manifest of layers that are on the disk, and make all names of the directory durable; return its
    digest.
    """
    write_synced(folder / MANIFEST_FILE, text)
    sync_path(folder)
    return text_digest(text)


def _digest_arrays(arrays: Iterable[F32], digests: list[str]) -> Iterator[F32]:
    """Pass arrays on to the writer; append the digest of each while the disk is busy with it."""
    for array in arrays:
        yield array
        digests.append(digest_of(array))


# ---- reading --------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> VersionManifest:
    """Read a version's manifest; raise CorruptSnapshot if it or a layer's file is missing, or has another size."""
    try:
        text = (folder / MANIFEST_FILE).read_bytes()
        with os.scandir(folder) as entries:  # a file may be gone by its turn
            sizes = {entry.name: entry.stat().st_size for entry in entries}
    except FileNotFoundError as error:
        raise CorruptSnapshot(f"{folder}: is no whole version: {error}") from error
    manifest = VersionManifest.from_json(text, str(folder / MANIFEST_FILE))
    require_sizes(manifest, sizes, str(folder))
    return manifest


def require_sizes(manifest: VersionManifest, sizes: Mapping[str, int], where: str) -> None:
    """Raise CorruptSnapshot unless every layer's file is among `sizes`, with the size in the manifest."""
    for record in manifest.layers:
        found = sizes.get(record.file)
        if found is None:
            raise CorruptSnapshot(f"{where}: is no whole version: {record.file} of {record.layer.name} is missing")
        if found != record.size:
            raise CorruptSnapshot(f"{where}/{record.file}: expected {record.size} bytes, got {found}")


def find_complete(root: Path) -> dict[VersionId, VersionManifest]:
    """Return the manifests of all versions in a root whose files are complete, but for v0@r0."""
    found = {}
    for version, path in find_versions(root).items():
        try:
            found[version] = read_manifest(path)
        except CorruptSnapshot:  # not complete, so not offered; messages list those that are
            continue
    return found


def find_versions(root: Path) -> dict[VersionId, Path]:
    """Return the versions in a root with their directories, ascending, but for v0@r0; raise ConfigError if there is no
    such directory.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: expected a slave's snapshot directory, there is none")
    found = {version: path for path in root.iterdir() if (version := version_of(path)) is not None}
    found.pop(GENESIS, None)
    return dict(sorted(found.items()))


def read_layer(
    folder: Path,
    manifest: VersionManifest,
    record: LayerRecord,
    theta: F32 | None,
    momentum: F32 | None,
    on_piece: OnPiece = lambda _: None,
) -> None:
    """Fill θ and m of one layer, or one of them, one after the other, and compare the digest of each that is asked for
    before the next is read.
    """
    path = folder / record.file
    with path.open("rb", buffering=0) as file:
        begin = check_header(file, manifest, record, str(path))
        for at, (name, flat, expected) in enumerate(
            ((THETA, theta, record.theta), (MOMENTUM, momentum, record.momentum))
        ):
            if flat is None:
                continue
            if not expected:
                flat.fill(0.0)
                continue
            file.seek(begin + at * record.layer.nbytes)
            _read_into(file, flat, str(path), on_piece)
            _require_digest(digest_of(flat), expected, name, record, str(path))


def check_header(source: IO[bytes], manifest: VersionManifest, record: LayerRecord, where: str) -> int:
    """Read the header of a layer's file, which the manifest determines; return its length."""
    expected = manifest.header_of(record)
    if source.read(len(expected)) != expected:
        raise CorruptSnapshot(f"{where}: its header is not that of layer {record.layer.name} in {manifest.version}")
    return len(expected)


def _read_into(file: IO[bytes], flat: F32, where: str, on_piece: OnPiece) -> None:
    view = flat.view(np.uint8).data
    while view:
        nbytes = file.readinto(view[:PIECE_BYTES])  # type: ignore[attr-defined]
        if not nbytes:
            raise CorruptSnapshot(f"{where}: ends {len(view)} bytes early")
        on_piece(nbytes)
        view = view[nbytes:]


def _require_digest(found: str, expected: str, part: str, record: LayerRecord, where: str) -> None:
    if found != expected:
        raise CorruptSnapshot(
            f"{where}: {part}{record.layer.name}: expected xxh3-128 {expected}, its bytes give {found}"
        )


def read_through(folder: Path, manifest: VersionManifest, on_piece: OnPiece = lambda _: None) -> None:
    """Read a whole version and compare every digest, a piece at a time: a slave does so beside all of its memory."""
    for record in manifest.layers:
        path = folder / record.file
        with path.open("rb", buffering=0) as file:
            copy_layer(file, lambda _: None, manifest, record, str(path), on_piece)


def read_parameters(folder: Path) -> dict[str, F32]:
    """Return θ of every layer of a version as parameters by name, verified."""
    manifest, found = read_manifest(folder), dict[str, F32]()
    for record in manifest.layers:
        theta = np.empty(record.layer.numel, np.float32)
        read_layer(folder, manifest, record, theta, None)
        found.update({p.name: flat.reshape(p.shape) for p, flat in split_layer(record.layer, theta)})
    return found


def map_version(
    folder: Path, manifest: VersionManifest, layers: Collection[int], *, momentum: bool = False
) -> dict[int, F32]:
    """Map θ of these layers, or m; the maps stay readable when the version is deleted."""

    def find_begin(record: LayerRecord) -> int:
        return len(manifest.header_of(record)) + (record.layer.nbytes if momentum else 0)

    return {
        record.index: map_floats(folder / record.file, find_begin(record), record.layer.numel)
        for record in manifest.layers
        if record.index in layers
    }


# ---- copying --------------------------------------------------------------------------------------------------------


def copy_layer(
    source: IO[bytes], write: Callable[[bytes], object], manifest: VersionManifest, record: LayerRecord, where: str,
    on_piece: OnPiece = lambda _: None,
) -> None:  # fmt: skip
    """Copy a layer's file as it is, and compare its digests on the way, so that damaged bytes are not carried over."""
    check_header(source, manifest, record, where)
    write(manifest.header_of(record))
    for part, expected in ((THETA, record.theta), (MOMENTUM, record.momentum)):
        if not expected:
            continue
        digest, left = xxhash.xxh3_128(), record.layer.nbytes
        while left:
            with named_in_errors(where):  # a mirror's file is open beside it, which would be named in its place
                piece = source.read(min(left, PIECE_BYTES))
            if not piece:
                raise CorruptSnapshot(f"{where}: ends {left} bytes early")
            digest.update(piece)
            write(piece)
            left -= len(piece)
            on_piece(len(piece))
        _require_digest(digest.hexdigest(), expected, part, record, where)


# ---- names ----------------------------------------------------------------------------------------------------------
# Staged versions, written by `dips rebalance` or `dips recover`, wait for a row in the ledger to become versions.
#
#     .rebalanced-v12@r17               complete; beside v12@r17, which holds the former layers, or without it
#     .unfinished-rebalanced-v12@r17    being written, beside a slave that runs and may be started again meanwhile
#
# A crash may follow the row, so they are promoted by `dips recover` when it is repeated, or by the slave when the
# master names its layers. Before the row a rebalanced one is ignored: the layers that the master names are still those
# of v12@r17. A recovered one is of a round that the ledger has reserved, so the master orders it deleted, like the
# snapshots of a round that was skipped.


STAGED = ".rebalanced-"
STAGING = f"{ASIDE}rebalanced-"
REBALANCE_LOCK = ".rebalance.lock"  # in a slave's directory, held by the `dips rebalance` that copies into it


def staged_path(root: Path, version: VersionId) -> Path:
    return root / f"{STAGED}{version}"


def staged_versions(root: Path) -> list[VersionId]:
    """Return the versions with a staged snapshot here, ascending."""
    names = (path.name.removeprefix(STAGED) for path in root.glob(STAGED + "*"))
    return sorted(version for name in names if (version := version_of(Path(name))) is not None)


def stage_version(aside: Path, version: VersionId) -> None:
    """Rename a durable version to its staged name, replacing another one of this version."""
    staged = staged_path(aside.parent, version)
    if staged.exists():
        shutil.rmtree(staged)
    aside.rename(staged)
    sync_path(aside.parent)


def promote_if_ours(root: Path, version: VersionId, layers: Collection[int]) -> bool:
    """Promote a staged version if it holds just these layers and the present one does not; return whether it was."""
    if _layers_of(staged_path(root, version)) != set(layers) or _layers_of(root / str(version)) == set(layers):
        return False
    promote_version(root, version)
    return True


def promote_version(root: Path, version: VersionId) -> None:
    """Rename a staged version to its final name after deleting the present one. It has one of the two names at any
    time.
    """
    put_version(staged_path(root, version), root / str(version))


def put_version(aside: Path, path: Path) -> None:
    """Rename a durable version to its final name in the same root, after deleting the one that is there."""
    if path.exists():
        delete_version(path)
    aside.rename(path)
    sync_path(path.parent)


def delete_version(path: Path) -> None:
    """Remove a version, renamed first, so that a half-removed one is never taken for a whole one."""
    aside = path.with_name(f"{HALF_REMOVED}{path.name}")
    if aside.exists():  # of one that could not be removed before
        shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    sync_path(path.parent)
    shutil.rmtree(aside)


def _layers_of(folder: Path) -> set[int] | None:
    """Return the layers in a version's manifest; None if there is none."""
    try:
        return {record.index for record in read_manifest(folder).layers}
    except CorruptSnapshot:
        return None


# ---- verify ---------------------------------------------------------------------------------------------------------
# Reads versions and verifies them as a slave does before it uses them, without being one (`dips verify`).
#
# The slave may be running: versions that it deletes or writes meanwhile are skipped, not reported as damaged.


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one slave's snapshot of one version."""

    version: VersionId
    nbytes: int
    problem: str  # "" if it is intact


def version_sizes(root: Path) -> dict[VersionId, int]:
    """Return the versions in a root with their bytes, ascending; raise ConfigError if there is no directory. One that
    is deleted meanwhile has 0, and none for `check_version`.
    """
    sizes = dict.fromkeys(find_versions(root), 0)
    for version in sizes:
        with suppress(FileNotFoundError):
            sizes[version] = sum(file.stat().st_size for file in (root / str(version)).iterdir())
    return sizes


def check_version(
    root: Path, run: str, slave: str, version: VersionId, digest: str | None, read: OnPiece
) -> Checked | None:
    """Read and verify one version; return None if it was deleted meanwhile.

    digest  of its manifest, from the ledger; None: the ledger is not at hand, or does not have it
    read    called with the bytes of each piece that was read, for a progress bar
    """
    path, nbytes = root / str(version), 0

    def count_bytes(piece: int) -> None:
        nonlocal nbytes
        nbytes += piece
        read(piece)

    try:
        manifest = read_manifest(path)
        manifest.require_owner(run, slave, version, str(path))
        if digest not in (None, manifest.digest):
            raise CorruptSnapshot(f"its manifest hashes to {manifest.digest}, the ledger says {digest}")
        read_through(path, manifest, count_bytes)
    except (CorruptSnapshot, OSError) as error:
        return None if not path.exists() else Checked(version, nbytes, str(error))
    return Checked(version, nbytes, "")
