"""The manifest: the ordered list of layers that all processes must agree on, made from full (unsharded) parameters.

A layer is the unit of placement: a list of parameters that one slave holds. The manifest depends on the model alone,
never on how a cluster shards it, so clusters with different layouts train the same global model. Parameters are grouped
by the name of their block (`layers.3.attention.wq.weight` → `layers.3`), others by their module (`tok_embeddings`);
with `shared.layers: module` all by their module, for rules that look at each layer alone.

Buffers that the clusters share (`shared.share_buffers`) form one layer of their own, the last: the outer step averages
it by tokens, without learning rate and momentum, and no norm contains it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod

from dips.dataclass import dataclass
from dips.errors import CorruptManifest
from dips.protocol.grouping import AVERAGED_LAYER, PLAIN_GROUPING, Grouping

BYTES_PER_PARAMETER = 4  # the global model is fp32
MAX_NUMEL = (1 << 53) - 1  # of a model; bounds each dimension too
MAX_JSON_BYTES = (
    20 << 20
)  # of a manifest: 300,000 parameters of names like model.layers.17.mlp.experts.113.up_proj.weight
MOST_LAYERS = 100_000  # orders carry a number for each of a slave's layers: 800 kB of a message's 1 MiB
MAX_DIMENSIONS = 64  # of a parameter; torch itself refuses more


@dataclass(frozen=True, slots=True)
class Parameter:
    """One full parameter: its name in the model's state dict, and its unsharded shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that are placed together on one slave."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def nbytes(self) -> int:
        return self.numel * BYTES_PER_PARAMETER

    @property
    def averaged(self) -> bool:
        """Whether this is the layer of shared buffers, which the outer step averages."""
        return self.name == AVERAGED_LAYER

    def param_offsets(self) -> tuple[int, ...]:
        """Return where each parameter begins in the layer's flat array, in elements."""
        starts, at = [], 0
        for parameter in self.parameters:
            starts.append(at)
            at += parameter.numel
        return tuple(starts)


@dataclass(frozen=True)
class Manifest:
    """All layers of the model; a layer's index here identifies it on the wire."""

    layers: tuple[Layer, ...]

    @cached_property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @cached_property
    def blocks(self) -> frozenset[int]:
        """Indices of layers that are numbered blocks; the others are embeddings, the last norm, the output, shared
        buffers.
        """
        return frozenset(i for i, l in enumerate(self.layers) if any(part.isdigit() for part in l.name.split(".")))

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the same text as `json.dumps`; built by hand, since 50,000 lists would trigger a trainer's garbage
        collector.
        """
        return f'{{"format":1,"layers":[{",".join(map(_spell_layer, self.layers))}]}}'

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse the text of `to_json`; raise CorruptManifest on anything else."""
        if len(text) > MAX_JSON_BYTES:
            raise CorruptManifest(f"expected a manifest of at most {MAX_JSON_BYTES} bytes, got {len(text)}")
        try:
            raw = json.loads(text)
            if raw["format"] != 1:
                raise CorruptManifest(f"expected manifest format 1, got {raw['format']!r}")
            made = cls(
                tuple(
                    Layer(
                        _check_name(l["name"]),
                        tuple(Parameter(_check_name(n), _check_shape(s)) for n, s in l["parameters"]),
                    )
                    for l in raw["layers"]
                )
            )
            if made.numel > MAX_NUMEL:
                raise ValueError(f"expected at most {MAX_NUMEL} elements in all")
            if len(made.layers) > MOST_LAYERS:
                raise ValueError(f"expected at most {MOST_LAYERS} layers, got {len(made.layers)}")
            return made
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CorruptManifest(f"not a manifest: {error!r} in {text[:80]!r}") from error

    @classmethod
    def from_shapes(
        cls, shapes: Iterable[tuple[str, tuple[int, ...]]], grouping: Grouping = PLAIN_GROUPING
    ) -> Manifest:
        """Group (name, full shape) pairs into layers; layers and parameters are in the order of their names.

        Frameworks list a model's parameters in different orders, and a pipeline's ranks list only parts of them; the
        order of names, with numbers in them compared as numbers, is one that all can compute.
        """
        groups: dict[str, list[Parameter]] = {}
        keys = _PartKeys()
        for name, shape in sorted(shapes, key=lambda pair: keys.natural_key(pair[0])):
            groups.setdefault(grouping.layer_of(name), []).append(Parameter(name, tuple(shape)))
        in_order = sorted(groups.items(), key=lambda group: (group[0] == AVERAGED_LAYER, keys.natural_key(group[0])))
        return cls(tuple(Layer(name, tuple(parameters)) for name, parameters in in_order))

    def describe_differences(self, other: Manifest, most: int = 5) -> list[str]:
        """Describe where `other` differs from this one, in at most `most` lines, for an error message."""
        mine = {p.name: p.shape for layer in self.layers for p in layer.parameters}
        theirs = {p.name: p.shape for layer in other.layers for p in layer.parameters}
        lines = [f"{n}: expected shape {s}, it is missing or frozen" for n, s in mine.items() if n not in theirs]
        lines += [f"{n}: shape {s} was not expected: {ELSEWHERE}" for n, s in theirs.items() if n not in mine]
        lines += [f"{n}: expected shape {s}, got {theirs[n]}" for n, s in mine.items() if theirs.get(n, s) != s]
        lines += _describe_moved(self, other)
        if not lines and self.digest != other.digest:
            lines = ["same parameters in another order or grouping"]
        return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]


ELSEWHERE = "where the run was made it was missing or frozen"


def _describe_moved(mine: Manifest, theirs: Manifest) -> list[str]:
    """Describe names that are a buffer in one of the two and a parameter in the other."""
    kinds = [{p.name: layer.averaged for layer in m.layers for p in layer.parameters} for m in (mine, theirs)]
    words = {True: "a buffer of shared.share_buffers", False: "a parameter"}
    return [
        f"{name}: expected {words[kind]}, got {words[kinds[1][name]]}"
        for name, kind in kinds[0].items()
        if kinds[1].get(name, kind) != kind
    ]


def _spell_layer(layer: Layer) -> str:
    parameters = ",".join(f"[{json.dumps(p.name)},[{','.join(map(str, p.shape))}]]" for p in layer.parameters)
    return f'{{"name":{json.dumps(layer.name)},"parameters":[{parameters}]}}'


def _check_name(raw: object) -> str:
    if not isinstance(raw, str):
        raise TypeError(f"expected a name, got {raw!r:.80}")
    if not raw.isprintable():  # it is printed to terminals; lone surrogates cannot be encoded
        raise ValueError(f"expected a name that prints, got {raw!r:.80}")
    return raw


def _check_shape(raw: object) -> tuple[int, ...]:
    """Check a full shape and return it; a dimension of 0 is legal, `true`, 2.0 and Infinity are not."""
    if not isinstance(raw, list) or len(raw) > MAX_DIMENSIONS:
        raise TypeError(f"expected a shape of at most {MAX_DIMENSIONS} dimensions, got {raw!r:.80}")
    for dimension in raw:
        if type(dimension) is not int or not 0 <= dimension <= MAX_NUMEL:
            raise ValueError(f"expected whole numbers from 0 to {MAX_NUMEL}, got {dimension!r:.80}")
    return tuple(raw)


def unmatched_patterns(manifest: Manifest, share_buffers: Iterable[str]) -> list[str]:
    """Return the patterns that match no buffer of the model."""
    buffers = [p.name for layer in manifest.layers if layer.averaged for p in layer.parameters]
    return [pattern for pattern in share_buffers if not any(fnmatchcase(name, pattern) for name in buffers)]


class _PartKeys(dict[str, tuple[int, str]]):
    """Cache of sort keys for the parts of names: parts are few, while a model has tens of thousands of names."""

    def natural_key(self, name: str) -> list[tuple[int, str]]:
        """Return a key that sorts `layers.2` before `layers.10`."""
        return [self[part] for part in name.split(".")]

    def __missing__(self, part: str) -> tuple[int, str]:
        key = self[part] = (int(part), "") if part.isdigit() else (-1, part)
        return key
