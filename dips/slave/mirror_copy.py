"""Copies one snapshot from a slave's disk into its mirror, and back: `<mirror>/<run>/<slave>/v12@r17/`.

In both directions the bytes are compared with the digests in the snapshot's manifest while they are copied, so damaged
bytes are not carried over. The manifest is written last: a folder without one is an unfinished copy and is not used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO

import xxhash

from dips.dataclass import dataclass
from dips.errors import Corrupt, CorruptSnapshot, FailedMirror
from dips.fsync import sync_path
from dips.ids import VersionId
from dips.mirror import PIECE_BYTES, MirrorStore
from dips.slave.snapshot_files import ASIDE
from dips.slave.snapshot_manifest import MANIFEST_FILE, MODEL_FILE, SnapshotManifest
from dips.slave.tensorfile import ITEM
from dips.telemetry.logs import Log

MOST_MANIFEST_BYTES = 64 << 20

Moved = Callable[[int], None]  # called with the number of bytes of each piece copied


@dataclass(frozen=True, slots=True)
class MirrorListing:
    """The versions in a slave's mirror, ascending by round."""

    whole: tuple[VersionId, ...] = ()
    outdated: tuple[
        VersionId, ...
    ] = ()  # with other layers, from before a rebalance, or damaged: to be replaced or deleted
    reason: str = ""  # why the last one that is not in `whole` was ignored


def list_copies(
    store: MirrorStore,
    run: str,
    slave: str,
    log: Log,
    layers: Collection[int] | None = None,
    rotten: Mapping[VersionId, str] | None = None,
) -> MirrorListing:
    """List the versions whose copy is complete by its manifest and size; others are ignored, with a warning in the log.

    layers  layers that this slave holds, if known: a copy of other layers may have the same name
    rotten  versions whose bytes were found damaged → their `copy_state` then: not read again until that changes
    """
    whole, outdated, reason = list[VersionId](), list[VersionId](), ""
    for version in _list_versions(store):
        try:
            _, manifest = _read_manifest(store, run, slave, version)
        except Corrupt as error:
            reason = str(error)
        else:
            held = sorted(record.index for record in manifest.layers)
            if layers is not None and held != sorted(layers):
                reason = (
                    f"{store.url}/{version}: holds the layers {held}, this slave {sorted(layers)} since a rebalance"
                )
            elif rotten and version in rotten and rotten[version] == copy_state(store, version):
                reason = f"{store.url}/{version}: its bytes are not its digests'; it is replaced or deleted"
            else:
                whole.append(version)
                continue
            outdated.append(version)
        log.warning("mirror_passed_over", version=str(version), mirror=store.url, reason=reason)
    return MirrorListing(tuple(whole), tuple(outdated), reason)


def copy_state(store: MirrorStore, version: VersionId) -> str:
    """Return a string that differs if the copy's model file was replaced or changed."""
    return store.file_state(f"{version}/{MODEL_FILE}")


def _list_versions(store: MirrorStore) -> list[VersionId]:
    found = []
    for name in store.list_names():
        try:
            found.append(VersionId.parse(name))
        except ValueError:  # not a version's folder
            continue
    return sorted(found, key=lambda v: v.round)


def copy_out(store: MirrorStore, directory: Path, version: VersionId, moved: Moved) -> None:
    """Copy a snapshot; raise CorruptSnapshot if its bytes do not have their digests, FailedMirror for all other
    failures.

    A snapshot that is deleted meanwhile is copied to its end, since its file is open.
    """
    path, folder = directory / str(version), str(version)
    try:
        text = (path / MANIFEST_FILE).read_bytes()
        source = (path / MODEL_FILE).open("rb")
    except OSError as error:
        raise FailedMirror(f"{path} cannot be copied: {error}") from error
    with source:
        manifest = SnapshotManifest.from_json(text.decode(), str(path / MANIFEST_FILE))
        store.remove_path(folder)
        with store.create_file(f"{folder}/{MODEL_FILE}") as target:
            _pass_verified(source, target, manifest, str(path / MODEL_FILE), moved)
    arrived = store.file_size(f"{folder}/{MODEL_FILE}")
    if arrived != manifest.size:
        raise FailedMirror(f"{store.url}/{folder}/{MODEL_FILE}: expected {manifest.size} bytes, {arrived} arrived")
    store.write_file(f"{folder}/{MANIFEST_FILE}", text)


def bring_back(store: MirrorStore, directory: Path, run: str, slave: str, version: VersionId, moved: Moved) -> None:
    """Restore a snapshot into a slave's directory; it is durable on return.

    Raise CorruptSnapshot if the copy is not complete, FailedMirror if the mirror fails, OSError if this disk does.
    """
    text, manifest = _read_manifest(store, run, slave, version)
    partial, name = directory / f"{ASIDE}{version}", f"{version}/{MODEL_FILE}"
    try:
        partial.mkdir(exist_ok=True)
        with (partial / MODEL_FILE).open("wb") as target:
            with store.open_file(name) as source:
                _pass_verified(source, target, manifest, f"{store.url}/{name}", moved)
            _sync(target)
        with (partial / MANIFEST_FILE).open("wb") as target:
            target.write(text)
            _sync(target)
        sync_path(partial)
        partial.rename(directory / str(version))
        sync_path(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _read_manifest(store: MirrorStore, run: str, slave: str, version: VersionId) -> tuple[bytes, SnapshotManifest]:
    where = f"{store.url}/{version}"
    text = store.read_file(f"{version}/{MANIFEST_FILE}", MOST_MANIFEST_BYTES)
    if text is None:
        raise CorruptSnapshot(f"{where} has no manifest: it was not copied to its end")
    try:
        manifest = SnapshotManifest.from_json(text.decode(), f"{where}/{MANIFEST_FILE}")
    except UnicodeDecodeError as error:
        raise CorruptSnapshot(f"{where}/{MANIFEST_FILE}: is no manifest: {error}") from error
    if (manifest.run, manifest.slave, manifest.version) != (run, slave, version):
        raise CorruptSnapshot(
            f"{where}: expected {version} of slave {slave} in run {run}, got {manifest.version} of slave "
            f"{manifest.slave} in run {manifest.run}"
        )
    size = store.file_size(f"{version}/{MODEL_FILE}")
    if manifest.size != size:
        raise CorruptSnapshot(f"{where}/{MODEL_FILE}: expected {manifest.size} bytes, got {size}")
    return text, manifest


def _pass_verified(source: IO[bytes], target: IO[bytes], manifest: SnapshotManifest, where: str, moved: Moved) -> None:
    """Copy a model file: its header, then θ and m of each layer, and verify the digest of each."""
    length = source.read(8)
    header = int.from_bytes(length, "little")
    numel = sum(record.layer.numel for record in manifest.layers)
    if 8 + header + 2 * ITEM * numel != manifest.size:
        raise CorruptSnapshot(
            f"{where}: a header of {header} bytes and {numel} parameters are not {manifest.size} bytes"
        )
    target.write(length)
    _pass(source, target, header, where, moved)
    for record in manifest.layers:
        for part, expected in (("theta", record.theta), ("momentum", record.momentum)):
            found = _pass(source, target, ITEM * record.layer.numel, where, moved)
            if found != expected:
                raise CorruptSnapshot(
                    f"{where}: {part} of layer {record.layer.name}: expected xxh3-128 {expected}, got {found}"
                )


def _pass(source: IO[bytes], target: IO[bytes], nbytes: int, where: str, moved: Moved) -> str:
    """Copy `nbytes` bytes; return their digest."""
    digest = xxhash.xxh3_128()
    while nbytes:
        piece = source.read(min(nbytes, PIECE_BYTES))
        if not piece:
            raise CorruptSnapshot(f"{where}: ends {nbytes} bytes early")
        digest.update(piece)
        target.write(piece)
        nbytes -= len(piece)
        moved(len(piece))
    return digest.hexdigest()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
