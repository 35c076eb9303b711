"""The manifest of a snapshot, `manifest.json`: its owner, its contents, and the digests of its bytes.

Read by the slave that wrote it and by `dips export`. It does not know the file's path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import xxhash

from dips.dataclass import dataclass
from dips.errors import CorruptSnapshot
from dips.ids import VersionId
from dips.protocol.manifest import Layer, Parameter
from dips.slave.ports import F32

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
