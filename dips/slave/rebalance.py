"""Copies layers between the slaves' directories for `dips rebalance`, while no slave runs.

A complete snapshot is made: its layers are read from their present places, verified, written, fsynced and staged beside
existing snapshots (snapshots.py), then read back. Existing snapshots are not changed before the ledger has the
row. Uses the memory of one layer's θ. It does not know the ledger: the caller names the sources, and when a snapshot
becomes the slave's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash

from dips.dataclass import dataclass
from dips.errors import ConfigError, CorruptSnapshot
from dips.ids import VersionId
from dips.protocol.manifest import Manifest
from dips.slave import snapshots, tensorfile
from dips.slave.ports import F32
from dips.slave.snapshot_files import (
    ASIDE,
    MANIFEST_FILE,
    MODEL_FILE,
    MOMENTUM,
    THETA,
    LayerRecord,
    find_whole,
    read_manifest,
    read_part,
    read_through,
    version_of,
    write_snapshot,
)
from dips.slave.snapshots import LISTING_BYTES, STAGED, delete_snapshot, promote_snapshot, staged_path, staged_versions
from dips.slave.tensorfile import Reader

Report = Callable[[int], None]  # called with the number of bytes that are done
Digests = Mapping[tuple[int, str], str]  # (round, slave) → digest of the manifest, from the ledger


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """A snapshot to be made for a slave, with its layers and their sources."""

    run: str
    slave: str
    sinc: int
    version: VersionId
    directory: Path
    model: Manifest
    sources: Mapping[int, Path]  # layer → the snapshot that holds it, in the model's order

    @property
    def nbytes(self) -> int:
        """Bytes of θ and m."""
        return 2 * sum(self.model.layers[layer].nbytes for layer in self.sources)


def manifest_digest(path: Path) -> str:
    """Return the digest that the ledger keeps of a snapshot; raise CorruptSnapshot if it is not complete."""
    read_manifest(path)
    return xxhash.xxh3_128_hexdigest((path / MANIFEST_FILE).read_bytes())


def find_placed(
    directories: Sequence[Path], run: str, slave: str, layers: Sequence[int], digests: Digests
) -> dict[VersionId, Path]:
    """Return the complete snapshots of a slave that hold just `layers`, from all directories that it may have.

    Raise ConfigError if no directory is there, or one is of another run. Bytes are not verified here; copying does
    that.
    """
    here = [directory for directory in directories if directory.is_dir()]
    if not here:
        raise ConfigError(
            f"{slave}: its snapshots are to be read from {' or '.join(map(str, directories))}, which is not here: "
            "mount it, or restore it"
        )
    found: dict[VersionId, Path] = {}
    for directory in here:
        for version, manifest in find_whole(directory).items():
            path = directory / str(version)
            if manifest.run != run:
                raise ConfigError(f"{path} is a snapshot of run {manifest.run!r}, expected run {run!r}")
            ours = manifest.slave == slave and {r.index for r in manifest.layers} == set(layers)
            if ours and digests.get((version.round, slave), digest := manifest_digest(path)) == digest:
                found.setdefault(version, path)
    return found


def finish_staged(
    directory: Path,
    slave: str,
    digests: Digests,
    on_damaged: Callable[[CorruptSnapshot], None],
    discard: Callable[[Path], None] = delete_snapshot,
) -> tuple[list[VersionId], list[VersionId]]:
    """Promote the staged snapshots that have a row; return (promoted, staged without a row).

    A damaged one is passed to `on_damaged` and left for a person.
    """
    finished, without_row = list[VersionId](), list[VersionId]()
    for version in staged_versions(directory):
        try:
            digest = manifest_digest(staged_path(directory, version))
        except CorruptSnapshot as error:
            on_damaged(error)
            continue
        if digest == digests.get((version.round, slave)):
            promote_snapshot(directory, version, discard)
            finished.append(version)
        else:
            without_row.append(version)
    return finished, without_row


def reserve_room(copies: Sequence[SnapshotCopy]) -> None:
    """Reserve disk space for all copies that are not staged yet, before any is written; raise OSError if a disk is
    full.
    """
    for copy in copies:
        if not is_staged(copy):
            aside = _aside(copy)
            aside.mkdir(exist_ok=True)
            listed = sum(len(copy.model.layers[layer].parameters) for layer in copy.sources)
            tensorfile.reserve_file(aside / MODEL_FILE, copy.nbytes + LISTING_BYTES * (1 + listed))


def is_staged(copy: SnapshotCopy) -> bool:
    """Whether an earlier try has staged this snapshot, which is then the same to the byte."""
    try:
        manifest = read_manifest(staged_path(copy.directory, copy.version))
    except CorruptSnapshot:
        return False
    return (manifest.slave, manifest.sinc, [r.index for r in manifest.layers]) == (
        copy.slave,
        copy.sinc,
        list(copy.sources),
    )


def stage_snapshot(copy: SnapshotCopy, report: Report) -> str:
    """Make a snapshot, verifying its sources, and stage it; return the digest of its manifest.

    Raise CorruptSnapshot naming what is damaged, OSError if the disk fails.
    """
    staged, aside = staged_path(copy.directory, copy.version), _aside(copy)
    if is_staged(copy):
        report(copy.nbytes)
    else:
        aside.mkdir(exist_ok=True)
        owner = (copy.run, copy.slave, copy.sinc)
        write_snapshot(aside, owner, copy.version, copy.model, copy.sources, _read_layers(copy, report))
        snapshots.stage_snapshot(aside, copy.version)
    return manifest_digest(staged)


def check_staged(copy: SnapshotCopy, report: Report) -> None:
    """Read a staged snapshot back, and compare the digests of every layer with those of its source."""
    path, sources = staged_path(copy.directory, copy.version), _source_records(copy)
    manifest = read_manifest(path)
    for record in manifest.layers:
        source = sources[record.index]
        if source != record:
            raise CorruptSnapshot(
                f"{path}: layer {record.layer.name}: expected the digests of {copy.sources[record.index]}, "
                f"{source.theta} and {source.momentum}, got {record.theta} and {record.momentum}"
            )
    read_through(path, manifest, report)


def unstage_snapshot(copy: SnapshotCopy) -> None:
    """Delete everything that a failed try has written."""
    for path in (_aside(copy), staged_path(copy.directory, copy.version)):
        shutil.rmtree(path, ignore_errors=True)


def clean_directory(directory: Path, run: str, present: VersionId | None, discard: Callable[[Path], None]) -> None:
    """Discard the snapshots of this run of versions other than `present`, and delete unfinished and staged ones.

    Damaged snapshots and those of another run are left for a person.
    """
    for path in sorted(directory.glob("v*@r*")):
        version = version_of(path)
        if version is not None and version != present and _is_of_run(path, run):
            discard(path)
    for path in [*directory.glob(f"{STAGED}*"), *directory.glob(f"{ASIDE}*")]:
        delete_snapshot(path) if path.name.startswith(STAGED) else shutil.rmtree(path)


def _aside(copy: SnapshotCopy) -> Path:
    return copy.directory / f"{ASIDE}{copy.version}"


def _read_layers(copy: SnapshotCopy, report: Report) -> Iterator[F32]:
    """Iterate over θ and m of each layer, verified, in one buffer that is refilled each time."""
    records = _source_records(copy)
    buffer = np.empty(max(record.layer.numel for record in records.values()), np.float32)
    for layer, path in copy.sources.items():
        record = records[layer]
        flat = buffer[: record.layer.numel]
        with Reader(path / MODEL_FILE) as reader:
            for prefix, digest in ((THETA, record.theta), (MOMENTUM, record.momentum)):
                read_part(reader, record, prefix, flat, digest)
                yield flat
                report(flat.nbytes)


def _source_records(copy: SnapshotCopy) -> dict[int, LayerRecord]:
    """Return the records of the layers from the manifests of all sources."""
    manifests = [read_manifest(path) for path in dict.fromkeys(copy.sources.values())]
    return {r.index: r for manifest in manifests for r in manifest.layers if r.index in copy.sources}


def _is_of_run(path: Path, run: str) -> bool:
    try:
        return read_manifest(path).run == run
    except CorruptSnapshot:
        return False
