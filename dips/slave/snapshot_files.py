"""One snapshot on the disk, read and compared with its digests: by its slave, by `dips verify` and `dips export`.

Every way for it to be wrong raises CorruptSnapshot with the file's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dips.errors import CorruptSnapshot
from dips.ids import VersionId
from dips.protocol.manifest import Layer
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
from dips.slave.tensorfile import Reader


def read_manifest(path: Path) -> SnapshotManifest:
    """Read the manifest of the snapshot in `path`; raise CorruptSnapshot if it or the model file is not whole."""
    try:
        text = (path / MANIFEST_FILE).read_text()
        size = (path / MODEL_FILE).stat().st_size
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise CorruptSnapshot(f"{path}: is no whole snapshot: {error}") from error
    manifest = SnapshotManifest.from_json(text, str(path / MANIFEST_FILE))
    if size != manifest.size:
        raise CorruptSnapshot(f"{path / MODEL_FILE}: expected {manifest.size} bytes, got {size}")
    return manifest


def read_theta(reader: Reader, record: LayerRecord, theta: F32) -> None:
    """Fill θ of one layer and compare its digest."""
    _read_part(reader, record, THETA, theta, record.theta)


def read_layer(reader: Reader, record: LayerRecord, theta: F32, momentum: F32) -> None:
    """Fill θ and m of one layer and compare their digests; raise CorruptSnapshot naming the one that differs."""
    _read_part(reader, record, THETA, theta, record.theta)
    _read_part(reader, record, MOMENTUM, momentum, record.momentum)


def _read_part(reader: Reader, record: LayerRecord, prefix: str, flat: F32, expected: str) -> None:
    for parameter, piece in split_layer(record.layer, flat):
        reader.read_into(prefix + parameter.name, parameter.shape, piece)
    found = digest_of(flat)
    if found != expected:
        raise CorruptSnapshot(
            f"{reader.path}: {prefix}{record.layer.name}: expected xxh3-128 {expected}, its bytes give {found}"
        )


def map_layers(path: Path, layers: Mapping[int, Layer], prefix: str) -> Arrays:
    with Reader(path) as reader:
        whole = reader.map_file()
        return {
            index: reader.view_tensors(whole, [(prefix + p.name, p.shape) for p in layer.parameters])
            for index, layer in layers.items()
        }


def digest_arrays(arrays: Iterable[F32], digests: list[str]) -> Iterator[F32]:
    """Pass arrays on to the writer; append each one's digest while the disk is busy with it."""
    for array in arrays:
        yield array
        digests.append(digest_of(array))


def version_of(path: Path) -> VersionId | None:
    """The version whose snapshot this directory is, None if it is none."""
    try:
        return VersionId.parse(path.name)
    except ValueError:
        return None
