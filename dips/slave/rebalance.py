"""Copies layers between the slaves' roots for `dips rebalance`, while no slave runs.

A layer's file is copied as it is, from the root that holds it into a version aside in its new owner's, verified on the
way; the version gets a manifest of its own, is staged beside existing ones, and read back. Existing versions are not
changed before the ledger has the row. It does not know the ledger: the caller names the sources, and when a version
becomes the slave's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dips.dataclass import dataclass
from dips.errors import ConfigError, CorruptSnapshot
from dips.ids import GENESIS, VersionId
from dips.protocol.manifest import Manifest
from dips.store import files
from dips.store.files import (
    ASIDE,
    STAGED,
    SyncQueue,
    copy_layer,
    delete_version,
    find_complete,
    make_manifest,
    promote_version,
    read_manifest,
    read_through,
    reserve_version,
    staged_path,
    staged_versions,
    write_manifest,
)
from dips.store.version import LayerRecord, VersionManifest, version_of

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
        for version, manifest in find_complete(directory).items():
            path = directory / str(version)
            if manifest.run != run:
                raise ConfigError(f"{path} is a snapshot of run {manifest.run!r}, expected run {run!r}")
            ours = manifest.slave == slave and {r.index for r in manifest.layers} == set(layers)
            if ours and digests.get((version.round, slave), manifest.digest) == manifest.digest:
                found.setdefault(version, path)
    return found


def finish_staged(
    directory: Path,
    slave: str,
    digests: Digests,
    on_damaged: Callable[[CorruptSnapshot], None],
    discard: Callable[[Path], None] = delete_version,
) -> tuple[list[VersionId], list[VersionId]]:
    """Promote the staged snapshots that have a row; return (promoted, staged without a row).

    A damaged one is passed to `on_damaged` and left for a person.
    """
    finished, without_row = list[VersionId](), list[VersionId]()
    for version in staged_versions(directory):
        try:
            digest = read_manifest(staged_path(directory, version)).digest
        except CorruptSnapshot as error:
            on_damaged(error)
            continue
        if digest == digests.get((version.round, slave)):
            promote_version(directory, version, discard)
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
            shutil.rmtree(_aside(copy), ignore_errors=True)  # of a try that was killed, perhaps with other layers
            reserve_version(_aside(copy), copy.run, copy.version, copy.model, copy.sources)


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
    if is_staged(copy):
        report(copy.nbytes)
    else:
        _copy_layers(copy, _aside(copy), report)
        files.stage_version(_aside(copy), copy.version)
    return read_manifest(staged_path(copy.directory, copy.version)).digest


def check_staged(copy: SnapshotCopy, report: Report) -> None:
    """Read a staged snapshot back, and compare the digests of every layer with those of its source."""
    path, sources = staged_path(copy.directory, copy.version), _source_records(copy)
    manifest = read_manifest(path)
    for record in manifest.layers:
        _, source = sources[record.index]
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
        if version not in (None, GENESIS, present) and _is_of_run(path, run):
            discard(path)
    for path in [*directory.glob(f"{STAGED}*"), *directory.glob(f"{ASIDE}*")]:
        delete_version(path) if path.name.startswith(STAGED) else shutil.rmtree(path)


def _aside(copy: SnapshotCopy) -> Path:
    return copy.directory / f"{ASIDE}{copy.version}"


def _copy_layers(copy: SnapshotCopy, aside: Path, report: Report) -> None:
    """Fill `aside` with a version of the layers' files, as they are in their sources."""
    aside.mkdir(exist_ok=True)
    records, queue = _source_records(copy), SyncQueue()
    for layer, folder in copy.sources.items():
        manifest, record = records[layer]
        target = aside / record.file
        with (folder / record.file).open("rb") as source, target.open("r+b" if target.exists() else "wb") as file:
            copy_layer(source, file, manifest, record, str(folder / record.file), report)
            file.truncate()
        queue.add_file(target, record.size)
    queue.sync_files()
    layers = [records[layer][1] for layer in copy.sources]
    write_manifest(aside, make_manifest((copy.run, copy.slave, copy.sinc), copy.version, copy.model, layers).to_json())


def _source_records(copy: SnapshotCopy) -> dict[int, tuple[VersionManifest, LayerRecord]]:
    """Return the records of the layers, each with its manifest, from all sources."""
    manifests = [read_manifest(path) for path in dict.fromkeys(copy.sources.values())]
    return {r.index: (manifest, r) for manifest in manifests for r in manifest.layers if r.index in copy.sources}


def _is_of_run(path: Path, run: str) -> bool:
    try:
        return read_manifest(path).run == run
    except CorruptSnapshot:
        return False
