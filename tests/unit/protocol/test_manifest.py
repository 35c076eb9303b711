"""A manifest that comes from outside is a manifest or CorruptManifest, whatever its JSON holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dips.errors import CorruptManifest
from dips.protocol.enums import LayerUnit
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import MAX_DIMENSIONS, MAX_NUMEL, Manifest


def spelled(name: Any = "l.w", shape: Any = (4, 4), layer: Any = "l") -> str:
    return json.dumps({"format": 1, "layers": [{"name": layer, "parameters": [[name, shape]]}]})


@pytest.mark.parametrize("shape", [(), (0,), (4, 5), (MAX_NUMEL,)])
def test_legal_shapes(shape: tuple[int, ...]) -> None:
    """Scalars, empty parameters and the largest that is let in are read as they were written."""
    manifest = Manifest.from_json(spelled(shape=shape))
    assert manifest.layers[0].parameters[0].shape == shape
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_layers_are_blocks_or_modules() -> None:
    """A block with all in it, or each module alone; what is outside of blocks, and a model's own, are alike in both."""
    names = [
        "layers.10.attention.wq.weight", "layers.2.attention.wq.weight", "layers.2.attention.wq.bias",
        "layers.2.mlp.0.weight", "layers.2.scale", "embeddings.weight", "temperature", "layers.2.moe.bias",
    ]  # fmt: skip
    shapes = [(name, (2,)) for name in names]

    def grouped(unit: LayerUnit) -> dict[str, list[str]]:
        manifest = Manifest.from_shapes(shapes, Grouping(unit, ("*.moe.bias",)))
        assert manifest.blocks == {i for i, layer in enumerate(manifest.layers) if layer.name.startswith("layers.")}
        return {
            layer.name: [p.name.removeprefix(f"{layer.name}.") for p in layer.parameters] for layer in manifest.layers
        }

    outside = {"embeddings": ["weight"], "temperature": ["temperature"], "<buffers>": ["layers.2.moe.bias"]}
    block = ["attention.wq.bias", "attention.wq.weight", "mlp.0.weight", "scale"]
    assert grouped(LayerUnit.BLOCK) == {**outside, "layers.2": block, "layers.10": ["attention.wq.weight"]}
    assert grouped(LayerUnit.MODULE) == {
        **outside, "layers.2": ["scale"], "layers.2.attention.wq": ["bias", "weight"], "layers.2.mlp.0": ["weight"],
        "layers.10.attention.wq": ["weight"],
    }  # fmt: skip
    assert list(grouped(LayerUnit.MODULE))[2:5] == ["layers.2.attention.wq", "layers.2.mlp.0", "layers.10.attention.wq"]


def test_its_json_is_what_json_dumps_writes() -> None:
    """The digest is of these bytes: names that need escapes, scalars and empty parameters included."""
    names = ['a"b', "back\\slash", "ä", "𝜃 and 中", "emb.0.w"]
    manifest = Manifest.from_shapes([(name, (2,) * i) for i, name in enumerate(names)])
    layers = [
        {"name": layer.name, "parameters": [[p.name, list(p.shape)] for p in layer.parameters]}
        for layer in manifest.layers
    ]
    assert manifest.to_json() == json.dumps({"format": 1, "layers": layers}, separators=(",", ":"))
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    "dimension", [float("inf"), float("nan"), 1e300, 2.0, True, -1, MAX_NUMEL + 1, 10**4000, "4", None, [4], {}]
)
def test_a_dimension_is_a_whole_number(dimension: Any) -> None:
    """Everything else is refused with what was expected."""
    with pytest.raises(CorruptManifest):
        Manifest.from_json(spelled(shape=[4, dimension]))


@pytest.mark.parametrize("shape", ["44", 4, None, {"4": 4}, [1] * (MAX_DIMENSIONS + 1), [1 << 30, 1 << 30]])
def test_a_shape_is_a_short_list_of_a_model_that_can_be(shape: Any) -> None:
    """Text that happens to hold digits, too many dimensions, and more elements than any model has are no shapes."""
    with pytest.raises(CorruptManifest):
        Manifest.from_json(spelled(shape=shape))


@pytest.mark.parametrize("name", [3, None, ["a"], {}, "half \ud800 a pair"])
def test_a_name_is_text(name: Any) -> None:
    """A name that cannot be a key, or that no message could carry back, is refused before it is compared."""
    for text in (spelled(name=name), spelled(layer=name)):
        with pytest.raises(CorruptManifest):
            Manifest.from_json(text)


@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"format":' * 1_000_000, "", "null", "[]", "1", '"x"', "NaN"])
def test_any_json_and_none(text: str) -> None:
    """JSON nested a million deep, and JSON of another kind, are no manifests."""
    with pytest.raises(CorruptManifest):
        Manifest.from_json(text)


def test_a_parameter_has_as_many_dimensions_as_it_says() -> None:
    assert Manifest.from_json(spelled(shape=[1] * MAX_DIMENSIONS)).numel == 1


def test_a_nested_shape() -> None:
    """Depth within an otherwise good manifest is refused as well."""
    text = spelled(shape="HERE").replace('"HERE"', "[" * 100_000 + "]" * 100_000)
    with pytest.raises(CorruptManifest):
        Manifest.from_json(text)
