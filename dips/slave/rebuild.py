"""Writes a version into the slaves' directories from a model's file: the part of `dips recover` that replaces lost
disks.

θ of every layer comes from the file, so that the model is one that was saved, not a mixture of two moments. Momentum
comes from each slave's newest complete snapshot, on its disk or in its mirror; where neither has one it is 0, the
initial value in torch's SGD. The directories are locked meanwhile, and everything is staged before any of it counts
(snapshots.py).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from dips.config import RunFile, SlaveSection
from dips.dataclass import dataclass
from dips.errors import ConfigError, CorruptSnapshot, FailedDisk, FailedMirror
from dips.ids import VersionId
from dips.protocol.manifest import Manifest
from dips.protocol.records import RunRow
from dips.slave.ports import F32
from dips.slave.rebalance import Digests, finish_staged
from dips.slave.snapshot_mirror import SnapshotMirror
from dips.slave.snapshots import Snapshots
from dips.store.files import (
    ASIDE,
    promote_version,
    read_layer,
    read_manifest,
    stage_version,
    staged_path,
    write_version,
)
from dips.store.mirror import MirrorStore
from dips.store.tensorfile import Reader
from dips.store.version import split_layer
from dips.telemetry.logs import Log


@dataclass(frozen=True, slots=True)
class SlaveFinding:
    """The remaining data of one slave."""

    slave: str
    layers: tuple[int, ...]
    momentum_of: VersionId | None  # its newest complete snapshot; None: momentum is lost
    lacking: str = ""  # why its mirror restored nothing; "" if it did, or there is none


class Rebuild:
    """The directories of all slaves, locked until `close`."""

    def __init__(self, config: RunFile, row: RunRow, digests: Digests, model: Path, log: Log) -> None:
        """Lock the directories; promote snapshots staged by an earlier try whose row is in `digests`, delete other
        staged ones.

        Raise ConfigError if a slave runs, or the file does not hold this run's model.
        """
        self._manifest, self._row, self._model, self._log = Manifest.from_json(row.manifest), row, model, log
        self._stack, self._disks = ExitStack(), dict[str, Snapshots]()
        self._sections = {name: config.slave_section(name) for name, _ in row.placement}
        self.finished: set[VersionId] = set()  # versions that this try promoted for an earlier one
        try:
            self._check_model()
            for name, section in self._sections.items():
                disk = Snapshots(section.directory, row.run, name, section.initial_model, log)
                self._disks[name] = disk
                self._stack.callback(disk.close)
            for name, section in self._sections.items():
                finished, without_row = finish_staged(section.directory, name, digests, self._tell_damaged)
                self.finished.update(finished)
                for version in without_row:
                    shutil.rmtree(staged_path(section.directory, version))
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Unlock the directories."""
        self._stack.close()

    def look_at_disks(self) -> list[SlaveFinding]:
        """Read every directory, restore what is newer in its mirror, and return which slaves still have momentum."""
        found = []
        for name, layers in self._row.placement:
            lacking = self._bring_back(name, layers)
            complete = self._disks[name].complete_versions(self._disks[name].unread_versions())
            fitting = [version for version in complete if self._holds_layers(name, version, layers)]
            newest = max(fitting, key=lambda v: v.round, default=None)
            found.append(SlaveFinding(name, layers, newest, lacking))
        return found

    def stage_version(
        self, version: VersionId, found: Sequence[SlaveFinding], sinc: int
    ) -> tuple[tuple[str, str], ...]:
        """Stage the version's snapshots; return (slave, digest of its manifest) for the ledger's row.

        The version's round must be reserved in the ledger, if there is one, so that a slave that starts without the row
        is not taken as proof of a newer ledger. Raise FailedDisk; then nothing is staged.
        """
        try:
            for one in found:
                self._reserve_room(version, one, sinc)
            return tuple((one.slave, self._stage_slave(version, one, sinc)) for one in found)
        except BaseException as error:
            for one in found:
                self._disks[one.slave].release_room(version)
                shutil.rmtree(staged_path(self._sections[one.slave].directory, version), ignore_errors=True)
            if isinstance(error, OSError):
                raise FailedDisk(f"the run is as it was: {error}") from error
            raise

    def place_version(self, version: VersionId) -> None:
        """Promote the staged snapshots of a version whose row is durable."""
        for section in self._sections.values():
            promote_version(section.directory, version)

    def layer_names(self, layers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._manifest.layers[layer].name for layer in layers)

    def _tell_damaged(self, error: CorruptSnapshot) -> None:
        self._log.warning("snapshot_passed_over", reason=str(error))

    def _bring_back(self, name: str, layers: tuple[int, ...]) -> str:
        """Restore from the slave's mirror as at its start; return why nothing was restored, "" if all is there."""
        section = self._sections[name]
        if section.mirror is None:
            return ""
        try:
            mirror = self._open_mirror(section)
            mirror.bind_layers(layers)
            disk = self._disks[name]
            return mirror.restore((*disk.complete_versions(), *disk.unread_versions())).reason
        except FailedMirror as error:
            return str(error)

    def _open_mirror(self, section: SlaveSection) -> SnapshotMirror:
        assert section.mirror is not None
        run, name, directory = self._row.run, section.name, section.directory
        store = MirrorStore(section.mirror, run, name, of=directory)
        return SnapshotMirror(store, directory, run, name, self._log, time.monotonic)

    def _holds_layers(self, name: str, version: VersionId, layers: Sequence[int]) -> bool:
        """Whether a snapshot holds these layers; another ledger may have placed others on this slave."""
        records = read_manifest(self._sections[name].directory / str(version)).layers
        return {record.index: record.layer for record in records} == {i: self._manifest.layers[i] for i in layers}

    def _reserve_room(self, version: VersionId, found: SlaveFinding, sinc: int) -> None:
        """Reserve disk space for one slave, so that a full disk is found before anything is written."""
        disk = self._disks[found.slave]
        disk.bind_layers(self._manifest, found.layers, [self._row.genesis[layer] for layer in found.layers], sinc)
        disk.reserve_room(version, 2 * sum(self._manifest.layers[layer].nbytes for layer in found.layers))

    def _stage_slave(self, version: VersionId, found: SlaveFinding, sinc: int) -> str:
        directory = self._sections[found.slave].directory
        aside, owner = directory / f"{ASIDE}{version}", (self._row.run, found.slave, sinc)
        flat = self._merge_layers(directory, found)
        digest = write_version(aside, owner, version, self._manifest, found.layers, flat)
        stage_version(aside, version)
        return digest

    def _merge_layers(self, directory: Path, found: SlaveFinding) -> Iterator[F32]:
        """Iterate over θ of the file and m of the slave's newest snapshot, with the memory of one layer."""
        folder = None if found.momentum_of is None else directory / str(found.momentum_of)
        manifest = None if folder is None else read_manifest(folder)
        records = {} if manifest is None else {record.index: record for record in manifest.layers}
        for layer, theta in self._read_model(found.layers):
            yield theta
            momentum = np.zeros_like(theta)
            if folder is not None and manifest is not None:
                read_layer(folder, manifest, records[layer], None, momentum)
            yield momentum

    def _check_model(self) -> None:
        """Check, before anything is written, that the file has every parameter, in fp32 and finite."""
        try:
            for layer, array in self._read_model(range(len(self._manifest.layers))):
                if not np.isfinite(array).all():
                    name = self._manifest.layers[layer].name
                    raise ConfigError(f"--model {self._model}: layer {name} is not finite; take another file")
        except (CorruptSnapshot, OSError) as error:
            raise ConfigError(f"--model: this is not the run's model: {error}") from error

    def _read_model(self, layers: Sequence[int]) -> Iterator[tuple[int, F32]]:
        with Reader(self._model) as reader:
            for index in layers:
                layer = self._manifest.layers[index]
                array = np.empty(layer.numel, np.float32)
                for parameter, flat in split_layer(layer, array):
                    reader.read_into(parameter.name, parameter.shape, flat)
                yield index, array
