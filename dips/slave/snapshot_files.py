"""One snapshot on disk: its manifest, writing it, and verified reading for its slave and for operators' commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import xxhash

from dips.dataclass import dataclass
from dips.errors import ConfigError, CorruptSnapshot
from dips.files import sync_path
from dips.ids import VersionId
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave import tensorfile
from dips.slave.ports import F32, Arrays
from dips.slave.tensorfile import OnPiece, Reader

# ---- snapshot manifest ----------------------------------------------------------------------------------------------
# The manifest of a snapshot, `manifest.json`: its owner, its contents, and the digests of its bytes.
#
# Read by the slave that wrote it and by `dips export`. It does not know the file's path.


FORMAT = 1
MODEL_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
THETA, MOMENTUM = "theta.", "momentum."  # prefixes of a parameter's own name


def digest_of(array: F32) -> str:
    """Return xxh3-128 of a layer's flat fp32 bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(array.view(np.uint8).data)


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer of a snapshot: its index in the model, and its digests."""

    index: int
    layer: Layer
    theta: str
    momentum: str


@dataclass(frozen=True, slots=True)
class SnapshotManifest:
    """One slave's part of one version."""

    run: str
    slave: str
    sinc: int
    version: VersionId
    model_digest: str  # of the run's manifest
    model_layers: int  # of the whole model, over all slaves
    layers: tuple[LayerRecord, ...]
    size: int  # bytes of the model file

    def to_json(self) -> str:
        raw = {
            "format": FORMAT,
            "run": self.run,
            "slave": self.slave,
            "sinc": self.sinc,
            "version": str(self.version),
            "model": {"digest": self.model_digest, "layers": self.model_layers},
            "layers": [
                {
                    "index": record.index,
                    "name": record.layer.name,
                    "parameters": [[p.name, list(p.shape)] for p in record.layer.parameters],
                    "theta": record.theta,
                    "momentum": record.momentum,
                }
                for record in self.layers
            ],
            "files": {MODEL_FILE: self.size},
        }
        return json.dumps(raw, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> SnapshotManifest:
        """Parse the text of `to_json`; raise CorruptSnapshot, naming `where`, on anything else."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise CorruptSnapshot(
                    f"{where}: expected snapshot format {FORMAT}, got {raw['format']!r}; go on with the Di-PS that "
                    "wrote it, or begin a new run from its `dips export`"
                )
            layers = tuple(
                LayerRecord(
                    int(one["index"]),
                    Layer(one["name"], tuple(Parameter(n, tuple(int(d) for d in s)) for n, s in one["parameters"])),
                    str(one["theta"]),
                    str(one["momentum"]),
                )
                for one in raw["layers"]
            )
            version, model = VersionId.parse(raw["version"]), raw["model"]
            return cls(
                raw["run"],
                raw["slave"],
                int(raw["sinc"]),
                version,
                model["digest"],
                int(model["layers"]),
                layers,
                int(raw["files"][MODEL_FILE]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptSnapshot(f"{where}: is no snapshot manifest: {error!r}") from error


def split_layer(layer: Layer, flat: F32) -> Iterator[tuple[Parameter, F32]]:
    """Iterate over a layer's parameters, with their parts of its flat array."""
    for parameter, at in zip(layer.parameters, layer.param_offsets(), strict=True):
        yield parameter, flat[at : at + parameter.numel]


# ---- snapshot files -------------------------------------------------------------------------------------------------
# Writing and verified reading of one snapshot on disk, for its slave and for `dips verify`, `dips export` and `dips
# rebalance`.
#
# Every defect raises CorruptSnapshot with the file's name.


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


# ---- verify ---------------------------------------------------------------------------------------------------------
# Reads snapshots and verifies them as a slave does before it uses them, without being one (`dips verify`).
#
# The slave may be running: snapshots that it deletes or writes meanwhile are skipped, not reported as damaged.


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one slave's snapshot of one version."""

    version: VersionId
    nbytes: int
    problem: str  # "" if it is intact


def snapshot_sizes(directory: Path) -> dict[VersionId, int]:
    """Return the snapshots in a slave's directory with their bytes, ascending; raise ConfigError if there is no
    directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: expected a slave's snapshot directory, there is none")
    found = {}
    for path in directory.glob("v*@r*"):
        try:
            version = VersionId.parse(path.name)
        except ValueError:  # another name of this form
            continue
        model = path / MODEL_FILE
        found[version] = model.stat().st_size if model.exists() else 0
    return dict(sorted(found.items()))


def check_snapshot(
    directory: Path, run: str, slave: str, version: VersionId, digest: str | None, read: Callable[[int], None]
) -> Checked | None:
    """Read and verify one snapshot; return None if it was deleted meanwhile.

    digest  of its manifest, from the ledger; None: the ledger is not at hand, or does not have it
    read    called with the bytes of each piece that was read, for a progress bar
    """
    path = directory / str(version)
    nbytes = 0

    def count(layer_bytes: int) -> None:
        nonlocal nbytes
        nbytes += layer_bytes
        read(layer_bytes)

    try:
        manifest = read_manifest(path)
        mine = (run, slave, version)
        if (manifest.run, manifest.slave, manifest.version) != mine:
            raise CorruptSnapshot(
                f"it is {manifest.version} of slave {manifest.slave} in run {manifest.run}, "
                f"expected {version} of slave {slave} in run {run}"
            )
        found = xxhash.xxh3_128_hexdigest((path / MANIFEST_FILE).read_bytes())
        if digest is not None and found != digest:
            raise CorruptSnapshot(f"its manifest hashes to {found}, the ledger says {digest}")
        read_through(path, manifest, count)
    except (CorruptSnapshot, OSError) as error:
        return None if not path.exists() else Checked(version, nbytes, str(error))
    return Checked(version, nbytes, "")
