"""One snapshot: the two files of a directory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import structlog

from dips.ids import VersionId
from dips.protocol.manifest import Manifest
from dips.slave.snapshots import Snapshots

RUN, SLAVE, VERSION = "golden", "ps0", VersionId(3, 5)
MANIFEST = Manifest.from_shapes([("a.w", (2, 3)), ("a.b", (3,)), ("b.w", (4,))])
LAYERS = (0, 1)


def arrays(first: float) -> dict[int, np.ndarray]:
    """Each layer's elements: `first`, `first` + 1/8, …"""
    return {i: first + np.arange(MANIFEST.layers[i].numel, dtype=np.float32) / np.float32(8) for i in LAYERS}


def opened(directory: Path) -> Snapshots:
    snapshots = Snapshots(directory, RUN, SLAVE, directory / "no-initial-model", structlog.get_logger())
    snapshots.bind_layers(MANIFEST, LAYERS, [""] * len(LAYERS), sinc=2)
    return snapshots


def make() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        snapshots = opened(Path(directory))
        snapshots.write_snapshot(VERSION, arrays(1.0), arrays(-2.0))
        snapshots.close()
        files = sorted((Path(directory) / str(VERSION)).iterdir())
        return {f"snapshot/{VERSION}/{path.name}": path.read_bytes() for path in files}
