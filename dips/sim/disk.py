"""The simulated disk of one slave: what was written survives every crash; what was being written may be torn."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random

import numpy as np

from dips.errors import CorruptSnapshot
from dips.ids import GENESIS, VersionId
from dips.slave.ports import F32, Arrays


@dataclass
class Snapshot:
    """One file: its content, and whether its manifest was written behind it."""

    theta: dict[int, F32]
    momentum: dict[int, F32]
    whole: bool = True

    @property
    def digest(self) -> str:
        crc = 0
        for arrays in (self.theta, self.momentum):
            for layer in sorted(arrays):
                crc = zlib.crc32(arrays[layer].tobytes(), crc)
        return f"{crc:08x}"


class SimDisk:
    """Implements `dips.slave.ports.Disk`; belongs to the machine, not to the process."""

    def __init__(self, genesis: Arrays, rng: Random) -> None:
        self._genesis = genesis
        self._rng = rng
        self.files: dict[VersionId, Snapshot] = {}
        self.full = False

    def complete(self) -> tuple[VersionId, ...]:
        return tuple(sorted(v for v, s in self.files.items() if s.whole))

    def reserve(self, version: VersionId, nbytes: int) -> None:
        if self.full:
            raise OSError(28, "no space left on the simulated disk")

    def release(self, version: VersionId) -> None:
        """Room is not counted here."""

    def write(self, version: VersionId, theta: Arrays, momentum: Arrays) -> str:
        if self.full:
            raise OSError(28, "no space left on the simulated disk")
        snapshot = Snapshot(_copies(theta), _copies(momentum))
        self.files[version] = snapshot
        return snapshot.digest

    def tear(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        """The machine stopped while it wrote: half of the bytes are there, and no manifest."""
        if version in self.files:
            return
        half = {
            layer: np.concatenate([a[: a.size // 2], np.zeros(a.size - a.size // 2, np.float32)])
            for layer, a in theta.items()
        }
        self.files[version] = Snapshot(half, _copies(momentum), whole=False)

    def read(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        snapshot = self.files.get(version)
        if snapshot is None and version == GENESIS:
            snapshot = Snapshot(dict(self._genesis), {layer: np.zeros_like(a) for layer, a in self._genesis.items()})
        if snapshot is None or not snapshot.whole:
            present = ", ".join(map(str, self.complete())) or "none"
            raise CorruptSnapshot(f"expected a whole snapshot of {version}, this disk has {present}")
        for layer, array in theta.items():
            array[:] = snapshot.theta[layer]
        for layer, array in momentum.items():
            array[:] = snapshot.momentum[layer]

    def map(self, version: VersionId) -> Arrays | None:
        """What the file holds; a reader keeps it when the file is deleted. v0@r0 has no file here."""
        snapshot = self.files.get(version)
        return snapshot.theta if snapshot is not None and snapshot.whole else None

    def delete(self, versions: tuple[VersionId, ...]) -> None:
        for version in versions:
            self.files.pop(version, None)


def _copies(arrays: Arrays) -> dict[int, F32]:
    return {layer: np.array(a, copy=True) for layer, a in arrays.items()}
