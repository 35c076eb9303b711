"""Assembles a version from the slaves' snapshots into one safetensors checkpoint under the model's own names.

Reads the directories of all slaves, running or not; writes aside, fsyncs and renames. A snapshot shows that a version
is complete, not that it is committed: only the ledger does, so a caller that has it names the version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dips.errors import ConfigError
from dips.files import explain_unwritable, write_aside
from dips.ids import GENESIS, VersionId
from dips.store import tensorfile
from dips.store.files import find_complete, read_layer, read_manifest
from dips.store.tensorfile import F32
from dips.store.version import LayerRecord, VersionManifest

Place = tuple[Path, VersionManifest, LayerRecord]  # a version's directory, its manifest, and a layer in it


def export_snapshot(directories: Sequence[Path], version: VersionId | None, output: Path) -> VersionId:
    """Write θ of `version`, or of the newest version complete in all `directories`, to `output`; return the version.

    Raises ConfigError if no (or not that) version is complete, it is deleted meanwhile, or `output` cannot be written,
    FailedDisk if its disk is full; CorruptSnapshot if bytes do not have their digest. Uses the memory of one layer. For
    v0@r0 `directories` is the root of the first model.
    """
    if version == GENESIS:
        manifests = {root / str(version): read_manifest(root / str(version)) for root in directories}
        chosen = version
    else:
        chosen, manifests = _choose_version(directories, version)
    places = _order_layers(chosen, manifests)
    shapes = [(p.name, p.shape) for *_, record in places for p in record.layer.parameters]
    first = next(iter(manifests.values()))
    metadata = {"format": "pt", "run": first.run, "version": str(chosen)}  # transformers requires `format`
    with explain_unwritable(output), write_aside(output, 0o600) as aside:
        tensorfile.write_tensors(aside, metadata, shapes, _read_layers(places))
    return chosen


def _choose_version(
    directories: Sequence[Path], version: VersionId | None
) -> tuple[VersionId, dict[Path, VersionManifest]]:
    """Choose the version; return it with each directory's snapshot of it."""
    if not directories:
        raise ConfigError("expected the snapshot directories of all slaves, got none")
    offered = {directory: find_complete(directory) for directory in directories}
    common = set.intersection(*(set(versions) for versions in offered.values()))
    if version is not None:
        common &= {version}
    if not common:
        listing = "; ".join(f"{d}: {', '.join(map(str, sorted(v))) or 'none'}" for d, v in offered.items())
        if version is None:
            raise ConfigError(f"no version is complete in all directories, which have: {listing}")
        raise ConfigError(
            f"{version} is gone, or never was: slaves keep the newest, and those of keep_every; here are: {listing}"
        )
    chosen = max(common)
    return chosen, {directory / str(chosen): offered[directory][chosen] for directory in directories}


def _order_layers(version: VersionId, manifests: dict[Path, VersionManifest]) -> list[Place]:
    """Return all layers in the model's order; raise ConfigError if one is missing, found twice, or of another run or
    model.
    """
    models = {(m.run, m.model_digest, m.model_layers) for m in manifests.values()}
    if len(models) != 1:
        raise ConfigError(f"{version}: the directories belong to different runs: {', '.join(map(str, manifests))}")
    _, _, layers = models.pop()
    found: dict[int, Place] = {}
    for path, manifest in manifests.items():
        for record in manifest.layers:
            if record.index in found:
                raise ConfigError(f"{version}: layer {record.layer.name} is in {found[record.index][0]} and in {path}")
            found[record.index] = (path, manifest, record)
    missing = [str(index) for index in range(layers) if index not in found]
    if missing:
        raise ConfigError(f"{version}: layers {', '.join(missing)} of {layers} are in none of the given directories")
    return [found[index] for index in range(layers)]


def _read_layers(places: Sequence[Place]) -> Iterator[F32]:
    for path, manifest, record in places:
        theta = np.empty(record.layer.numel, np.float32)
        try:
            read_layer(path, manifest, record, theta, None)
        except OSError as error:
            file, gone = path / record.file, ""
            if not file.exists():
                gone = f": {manifest.version} was deleted meanwhile; take a newer one, one that `keep_every` keeps, or "
                gone += "pull it with --master, which holds it"
            raise ConfigError(f"{file} cannot be read: {error.strerror}{gone}") from error
        yield theta
