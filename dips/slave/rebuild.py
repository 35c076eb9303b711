"""Writes a version into the slaves' directories from a model's file: what `dips recover` does to lost disks.

θ of every layer comes from the file, so that the model is the one that somebody saved, and no mixture of two moments.
Momentum comes from each slave's newest whole snapshot; where a directory has none it is 0, which is what torch's SGD
begins with. The directories are held against their slaves meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from dips.config import RunFile
from dips.dataclass import dataclass
from dips.errors import ConfigError, CorruptSnapshot
from dips.ids import VersionId
from dips.protocol.manifest import Manifest
from dips.protocol.records import RunRow
from dips.slave.ports import F32
from dips.slave.snapshot_manifest import split_layer
from dips.slave.snapshots import Snapshots
from dips.slave.tensorfile import Reader
from dips.telemetry.logs import Log


@dataclass(frozen=True, slots=True)
class SlaveFinding:
    """What one slave's directory still has."""

    slave: str
    layers: tuple[int, ...]
    momentum_of: VersionId | None  # its newest whole snapshot; None: momentum is lost


class Rebuild:
    """All slaves' directories, held until `close`."""

    def __init__(self, config: RunFile, row: RunRow, model: Path, log: Log) -> None:
        """Raise ConfigError if a slave runs, or the file does not hold this run's model."""
        self._manifest, self._row, self._model = Manifest.from_json(row.manifest), row, model
        self._stack, self._disks = ExitStack(), dict[str, Snapshots]()
        try:
            self._check_model()
            for name, _ in row.placement:
                section = config.slave_section(name)
                disk = Snapshots(section.directory, row.run, name, section.initial_model, log)
                self._disks[name] = disk
                self._stack.callback(disk.close)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Let the slaves have their directories again."""
        self._stack.close()

    def look_at_disks(self) -> list[SlaveFinding]:
        """Read every directory through, and say whose momentum is left."""
        found = []
        for name, layers in self._row.placement:
            complete = self._disks[name].complete_versions()
            newest = max(complete, key=lambda v: v.round, default=None)
            found.append(SlaveFinding(name, layers, newest))
        return found

    def write_version(
        self, version: VersionId, found: Sequence[SlaveFinding], sinc: int
    ) -> tuple[tuple[str, str], ...]:
        """Write the version's snapshots; return (slave, digest of its manifest) for the ledger's row."""
        return tuple((one.slave, self._write_slave(version, one, sinc)) for one in found)

    def layer_names(self, layers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._manifest.layers[layer].name for layer in layers)

    def _write_slave(self, version: VersionId, found: SlaveFinding, sinc: int) -> str:
        disk = self._disks[found.slave]
        disk.bind_layers(self._manifest, found.layers, [self._row.genesis[layer] for layer in found.layers], sinc)
        theta = {layer: np.empty(self._manifest.layers[layer].numel, np.float32) for layer in found.layers}
        momentum = {layer: np.zeros_like(array) for layer, array in theta.items()}
        if found.momentum_of is not None:
            disk.read_snapshot(found.momentum_of, theta, momentum)
        for layer, array in self._read_model(found.layers):
            theta[layer][:] = array
        return disk.write_snapshot(version, theta, momentum)

    def _check_model(self) -> None:
        """Every parameter is there, in fp32 and finite: found before anything is written."""
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
