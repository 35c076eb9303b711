"""Writing and verified reading of one snapshot on disk, for its slave and for `dips verify`, `dips export` and `dips
rebalance`.

Every defect raises CorruptSnapshot with the file's name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from dips.errors import ConfigError, CorruptSnapshot
from dips.fsync import sync_path
from dips.ids import VersionId
from dips.protocol.manifest import Layer, Manifest
from dips.slave import tensorfile
from dips.slave.ports import F32, Arrays
from dips.slave.snapshot_manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    MOMENTUM,
    THETA,
    LayerRecord,
    SnapshotManifest,
    digest_of,
    split_layer,
)
from dips.slave.tensorfile import OnPiece, Reader

ASIDE = ".unfinished-"  # prefix of incomplete or half-removed snapshots, which are removed when the slave starts


def read_manifest(path: Path) -> SnapshotManifest:
    """Read the manifest of the snapshot in `path`; raise CorruptSnapshot if it or the model file is not complete."""
    try:
        text = (path / MANIFEST_FILE).read_text()
        size = (path / MODEL_FILE).stat().st_size
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise CorruptSnapshot(f"{path}: is no whole snapshot: {error}") from error
    manifest = SnapshotManifest.from_json(text, str(path / MANIFEST_FILE))
    if size != manifest.size:
        raise CorruptSnapshot(f"{path / MODEL_FILE}: expected {manifest.size} bytes, got {size}")
    return manifest


def find_whole(directory: Path) -> dict[VersionId, SnapshotManifest]:
    """Return the manifests of all snapshots with complete files; raise ConfigError if there is no such directory."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: expected a slave's snapshot directory, there is none")
    found = {}
    for path in sorted(directory.glob("v*@r*")):
        version = version_of(path)
        try:
            if version is not None:
                found[version] = read_manifest(path)
        except CorruptSnapshot:  # not complete, so not offered; messages list those that are
            continue
    return found


def write_snapshot(
    path: Path,
    owner: tuple[str, str, int],
    version: VersionId,
    model: Manifest,
    layers: Iterable[int],
    flat: Iterable[F32],
    on_piece: OnPiece = lambda _: None,
) -> bytes:
    """Fill the directory `path` with a snapshot, durably; return the bytes of its manifest.

    owner     run, slave and incarnation
    flat      θ and m of each layer, in the order of `layers`; an array may be reused when the next one is asked for
    on_piece  called with the bytes of each piece written; its exceptions end the write
    Raises    OSError; the directory then holds no snapshot
    """
    run, slave, sinc = owner
    chosen = {index: model.layers[index] for index in layers}
    shapes = [
        (prefix + p.name, p.shape)
        for layer in chosen.values()
        for prefix in (THETA, MOMENTUM)
        for p in layer.parameters
    ]
    metadata = {"run": run, "slave": slave, "version": str(version)}
    digests: list[str] = []
    size = tensorfile.write_tensors(path / MODEL_FILE, metadata, shapes, digest_arrays(flat, digests), on_piece)
    records = tuple(
        LayerRecord(index, layer, of_theta, of_momentum)
        for (index, layer), of_theta, of_momentum in zip(chosen.items(), digests[::2], digests[1::2], strict=True)
    )
    manifest = SnapshotManifest(run, slave, sinc, version, model.digest, len(model.layers), records, size)
    text = manifest.to_json().encode()
    with (path / MANIFEST_FILE).open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_path(path)
    return text


def read_theta(reader: Reader, record: LayerRecord, theta: F32) -> None:
    """Fill θ of one layer and compare its digest."""
    read_part(reader, record, THETA, theta, record.theta)


def read_layer(reader: Reader, record: LayerRecord, theta: F32, momentum: F32) -> None:
    """Fill θ and m of one layer and compare their digests; raise CorruptSnapshot naming the one that differs."""
    read_part(reader, record, THETA, theta, record.theta)
    read_part(reader, record, MOMENTUM, momentum, record.momentum)


def read_part(reader: Reader, record: LayerRecord, prefix: str, flat: F32, expected: str) -> None:
    """Fill θ or m of one layer, by `prefix`, and compare its digest."""
    for parameter, piece in split_layer(record.layer, flat):
        reader.read_into(prefix + parameter.name, parameter.shape, piece)
    found = digest_of(flat)
    if found != expected:
        raise CorruptSnapshot(
            f"{reader.path}: {prefix}{record.layer.name}: expected xxh3-128 {expected}, its bytes give {found}"
        )


def read_through(path: Path, manifest: SnapshotManifest, on_piece: OnPiece = lambda _: None) -> None:
    """Read a whole snapshot and compare every digest, with the memory of one layer. `on_piece` is called with bytes
    read.

    Raise CorruptSnapshot naming what differs, OSError.
    """
    with Reader(path / MODEL_FILE, on_piece) as reader:
        for record in manifest.layers:
            theta, momentum = (np.empty(record.layer.numel, np.float32) for _ in range(2))
            read_layer(reader, record, theta, momentum)


def map_layers(path: Path, layers: Mapping[int, Layer], prefix: str) -> Arrays:
    with Reader(path) as reader:
        whole = reader.map_file()
        return {
            index: reader.view_tensors(whole, [(prefix + p.name, p.shape) for p in layer.parameters])
            for index, layer in layers.items()
        }


def digest_arrays(arrays: Iterable[F32], digests: list[str]) -> Iterator[F32]:
    """Pass arrays on to the writer; append the digest of each while the disk is busy with it."""
    for array in arrays:
        yield array
        digests.append(digest_of(array))


def version_of(path: Path) -> VersionId | None:
    """Return the version whose snapshot this directory is, None if it is none."""
    try:
        return VersionId.parse(path.name)
    except ValueError:
        return None
