"""The layout of a version, and its manifest: a file for each layer, and `manifest.json`, which lists them.

    v12@r17/00004.safetensors   layer 4: `theta.<parameter>` and `momentum.<parameter>`, fp32
    v12@r17/manifest.json       owner, version, and each layer's parameters, digests and file size

A *root* holds such directories of one owner: a slave's directory, `<mirror>/<run>/<slave>/`, and
`<master.directory>/initial/`, whose v0@r0 has no momentum, since it is 0. A layer's file does not name the owner, so
that it is copied from root to root as it is. Pure: texts and records, no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

import numpy as np
import xxhash

from dips.dataclass import dataclass
from dips.errors import CorruptSnapshot
from dips.ids import VersionId
from dips.protocol.manifest import Layer, Parameter
from dips.store.tensorfile import F32, Shapes, make_header

FORMAT = 1
MANIFEST_FILE = "manifest.json"
THETA, MOMENTUM = "theta.", "momentum."  # prefixes of a parameter's own name
OLD_LAYOUT = "model.safetensors"  # one file for all layers: how Di-PS wrote versions before it had this layout


def digest_of(array: F32) -> str:
    """Return xxh3-128 of a layer's flat fp32 bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(array.view(np.uint8).data)


def text_digest(text: bytes) -> str:
    """Return the digest that the ledger keeps of a version: xxh3-128 of its manifest, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(text)


def split_layer(layer: Layer, flat: F32) -> Iterator[tuple[Parameter, F32]]:
    """Iterate over a layer's parameters, with their parts of its flat array."""
    for parameter, at in zip(layer.parameters, layer.param_offsets(), strict=True):
        yield parameter, flat[at : at + parameter.numel]


def version_of(path: Path) -> VersionId | None:
    """Return the version whose directory this is, None if it is none."""
    try:
        return VersionId.parse(path.name)
    except ValueError:
        return None


def layer_file(index: int) -> str:
    return f"{index:05d}.safetensors"


def layer_shapes(layer: Layer, *, momentum: bool) -> Shapes:
    """Return names and shapes of the tensors in a layer's file, in their order."""
    prefixes = (THETA, MOMENTUM) if momentum else (THETA,)
    return [(prefix + p.name, p.shape) for prefix in prefixes for p in layer.parameters]


def layer_header(run: str, version: VersionId, layer: Layer, *, momentum: bool) -> bytes:
    """Return the bytes before the tensors in a layer's file; they follow from the manifest, so readers compare them."""
    metadata = {"format": "pt", "run": run, "version": str(version)}  # transformers requires `format`
    return make_header(metadata, layer_shapes(layer, momentum=momentum))


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer of a version: its index in the model, its digests, and the size of its file."""

    index: int
    layer: Layer
    theta: str
    momentum: str  # "": the file has none, and m is 0
    size: int

    @property
    def file(self) -> str:
        return layer_file(self.index)


@dataclass(frozen=True, slots=True)
class VersionManifest:
    """The layers of one version in one root."""

    run: str
    slave: str  # the owner of the root; "" in the root of the first model
    sinc: int
    version: VersionId
    model_digest: str  # of the run's manifest
    model_layers: int  # of the whole model, over all roots
    layers: tuple[LayerRecord, ...]
    digest: str = field(default="", compare=False)  # of the text that it was read from: what the ledger keeps

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' files."""
        return sum(record.size for record in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of θ and m in these files, without their headers."""
        return sum(record.layer.nbytes * (2 if record.momentum else 1) for record in self.layers)

    def header_of(self, record: LayerRecord) -> bytes:
        return layer_header(self.run, self.version, record.layer, momentum=bool(record.momentum))

    def to_json(self) -> bytes:
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
                    "bytes": record.size,
                }
                for record in self.layers
            ],
        }
        return json.dumps(raw, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes, where: str) -> VersionManifest:
        """Parse the text of `to_json`; raise CorruptSnapshot, naming `where`, on anything else."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT or OLD_LAYOUT in raw.get("files", ()):
                raise CorruptSnapshot(
                    f"{where}: expected a version of format {FORMAT} with a file for each layer, got format "
                    f"{raw['format']!r}{f' with one {OLD_LAYOUT}' if 'files' in raw else ''}; go on with the Di-PS "
                    "that wrote it, or begin a new run from its `dips export`"
                )
            layers = tuple(
                LayerRecord(
                    int(one["index"]),
                    Layer(one["name"], tuple(Parameter(n, tuple(int(d) for d in s)) for n, s in one["parameters"])),
                    str(one["theta"]),
                    str(one["momentum"]),
                    int(one["bytes"]),
                )
                for one in raw["layers"]
            )
            owner, model = (raw["run"], raw["slave"], int(raw["sinc"])), raw["model"]
            version, digest = VersionId.parse(raw["version"]), text_digest(text)
            return cls(*owner, version, model["digest"], int(model["layers"]), layers, digest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptSnapshot(f"{where}: is no version's manifest: {error!r}") from error

    def require_owner(self, run: str, slave: str, version: VersionId, where: str) -> None:
        """Raise CorruptSnapshot unless this is `version` of this owner in this run."""
        if (self.run, self.slave, self.version) != (run, slave, version):
            raise CorruptSnapshot(
                f"{where}: expected {version} of slave {slave} in run {run}, "
                f"got {self.version} of slave {self.slave} in run {self.run}"
            )
