"""The files of `dips plan cluster`: what is read, and a sentence for everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dips.errors import ConfigError
from dips.inside.planning.profile import (
    ClusterProfile,
    is_estimated,
    layer_seconds,
    parse_model,
    parse_profile,
    ring_seconds,
    set_rates,
)

INVENTORIES = Path(__file__).parents[4] / "configs" / "inventories"


def machines(**changes: Any) -> dict[str, Any]:
    """Two sites, two nodes at the first."""
    return {
        "nodes": [
            {"name": "a", "kind": "fast", "devices": 2, "site": "east"},
            {"name": "b", "kind": "fast", "devices": 2, "site": "east"},
            {"name": "c", "kind": "slow", "site": "west"},
        ],
        "kinds": {
            "fast": {"memory_gb": 80, "tflops": 300, "inside_gbit": 2400},
            "slow": {"memory_gb": 16, "tflops": 60},
        },
        "links": {
            "east": {"east": 100, "west": {"gbit": 1, "latency_us": 1000, "shared": True}},
            "west": {"east": {"gbit": 2, "latency_us": 1000}},
        },
        **changes,
    }


def kinds(**changes: Any) -> dict[str, Any]:
    return {"fast": {"memory_gb": 80, "tflops": 1, **changes}, "slow": {"memory_gb": 1, "tflops": 1}}


def measured(forward: list[float]) -> dict[str, Any]:
    return {"fast": {"block": {"forward": forward, "input": [1, 0], "weight": [1, 0]}}}


LAYER: dict[str, Any] = {
    "name": "block", "parameters": 1_000_000, "flops": 2e9, "activation_bytes": 1e6, "border_bytes": 1e5, "repeat": 4,
}  # fmt: skip


SHAPE = {"blocks": 2, "hidden": 8, "ffn": 16, "vocab": 32}


def needs(**changes: Any) -> dict[str, Any]:
    """A model of four layers."""
    return {"name": "small", "batch": 16, "layers": [LAYER], **changes}


def read(raw: dict[str, Any]) -> ClusterProfile:
    return parse_profile(raw, "profile.yaml")


def test_each_way_has_its_own_rate() -> None:
    """East to west is a shared line of 1 Gbit/s, back 2 Gbit/s for each pair; inside a node nothing of the network."""
    profile = read(machines())
    assert profile.route("a.0", "c.0").byte_s == 1 / 1.25e8
    assert ("line", "east", "west") in dict(profile.route("a.0", "c.0").uses)
    assert profile.route("c.0", "b.1").byte_s == 1 / 2.5e8
    assert dict(profile.route("a.0", "a.1").uses).keys() == {("a.0", "a.1")}


def test_a_ring_runs_at_its_slowest_hop() -> None:
    """Over both nodes of the east a collective has the card's rate; n − 1 turns of an n-th of the bytes."""
    ring = read(machines()).ring(["a.0", "a.1", "b.0", "b.1"])
    assert ring.byte_s == pytest.approx(1 / 1.25e10)
    assert ring.latency_s == pytest.approx(50e-6), "of the network, not of the node"
    assert ring_seconds(ring, 4, 4e9) == pytest.approx(3 * (1e9 / 1.25e10 + ring.latency_s))
    assert ring_seconds(ring, 1, 4e9) == 0
    two = dict(read(machines()).ring(["a.0", "b.0"]).uses)
    assert two == dict.fromkeys([("out", "a"), ("in", "b"), ("out", "b"), ("in", "a"), "ring"], 1 / 1.25e10)


def test_a_card_is_as_fast_as_is_said_or_as_its_fastest_link_to_another_node() -> None:
    """The rate inside a site of one node is that of no link."""
    raw = machines(links={**machines()["links"], "west": {"west": 400, "east": 2}})
    raw["nodes"][0]["card_gbit"] = 40
    assert read(raw).cards == {"a": 40 * 1.25e8, "b": 100 * 1.25e8, "c": 2 * 1.25e8}


def test_what_is_measured_goes_before_what_is_estimated() -> None:
    """A measured line gives slope × samples + start; without one FLOP/s and efficiency do; a recomputed forward is in
    I.
    """
    row = {"forward": [0.01, 0.001], "input": [0.02, 0.0], "weight": [0.03, 0.0]}
    profile, model = read(machines(measured={"fast": {"block": row}})), parse_model(needs(), "model.yaml")
    took = layer_seconds(profile, model, "fast", model.chain[0], 2)
    assert (took.f, took.i, took.w) == pytest.approx((0.021, 0.061, 0.06))
    assert layer_seconds(profile, model, "slow", model.chain[0], 2).w == pytest.approx(4e9 / (60e12 * 0.45) + 2e-4)
    assert not is_estimated(profile, model, "fast")
    assert is_estimated(profile, model, "slow")


def test_measured_rates_take_the_place_of_those_in_the_file() -> None:
    """Each in the line that the two nodes have, of several the mean of their seconds a byte; latency, `shared` and all
    other keys stay, and the file that was read is not changed.
    """
    raw = machines(links={**machines()["links"], "a": {"c": 4}})
    rates = {("a", "b"): 1.25e9, ("b", "c"): 0.25e8, ("c", "a"): 1.25e8, ("c", "b"): 1.25e8 / 3, ("a", "c"): 2.5e8}
    found = set_rates(raw, rates, "profile.yaml")
    assert found["links"] == {
        "east": {"east": 10.0, "west": {"gbit": 0.2, "latency_us": 1000, "shared": True}},
        "west": {"east": {"gbit": 0.5, "latency_us": 1000}},
        "a": {"c": 2.0},
    }
    assert {**found, "links": raw["links"]} == raw and raw["links"]["east"]["east"] == 100
    read(found)


@pytest.mark.parametrize("link", [("a", "d"), ("d", "a")])
def test_a_rate_of_a_node_that_the_file_lacks_is_refused(link: tuple[str, str]) -> None:
    """The profile was edited since the plan was made."""
    with pytest.raises(ConfigError, match=f"profile.yaml: links: expected the rate from {link[0]} to {link[1]}"):
        set_rates(machines(), {link: 1e9}, "profile.yaml")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (machines(links={"east": {"east": 100}}), "links.east.west: missing: expected the rate from a to c"),
        (machines(links={"east": {"east": 100, "west": 1}}), "links.west.east: one-way: expected the rate from c to a"),
        (machines(links={"east": {"north": 1}}), "links.north: expected a node or a site"),
        (machines(nodes=[{"name": "a", "kind": "fast"}] * 2), "two nodes are called a, so their devices have one name"),
        (machines(nodes=[]), "nodes: expected at least one node"),
        (machines(nodes=[{"name": "a", "kind": "T5"}]), "nodes.a.kind: expected one of fast, slow, got T5"),
        (machines(nodes=[{"name": "a", "kind": "fast", "devices": 0}]), "nodes: expected at least one node with"),
        (machines(nodes=[{"name": "a", "kind": "fast", "devices": -1}]), "nodes.a.devices: expected 0 to 1024, got -1"),
        (machines(nodes=[{"kind": "fast"}]), "nodes.0.name: missing, and it has no default"),
        (machines(node=[]), "node: unknown key"),
        (machines(kinds=kinds(tflops="many")), "kinds.fast.tflops: expected float, got 'many'"),
        (machines(kinds=kinds(memory_gb=-1)), "kinds.fast.memory_gb: expected a number above 0"),
        (machines(kinds=kinds(tflops=0)), "kinds.fast.tflops: expected a number above 0, got 0"),
        (machines(kinds=kinds(tflops=float("inf"))), "kinds.fast.tflops: expected a number above 0, got inf"),
        (machines(nodes=[{"name": "a", "kind": "fast", "devices": "two"}]), "nodes.a.devices: expected int, got 'two'"),
        (machines(measured=measured([9e9, 0])), "measured.fast.block.forward: absurd seconds"),
        (machines(measured=measured([1])), "measured.fast.block.forward: expected 2 values, got 1"),
        (machines(links=[1, 2]), "links: expected a mapping of keys, got [1, 2]"),
        (machines(links="fast"), "links: expected a mapping of keys, got 'fast'"),
    ],
)  # fmt: skip
def test_a_profile_that_cannot_be_planned_with_is_refused(raw: dict[str, Any], said: str) -> None:
    """The sentence names the file and the key."""
    with pytest.raises(ConfigError) as refused:
        read(raw)
    assert said in str(refused.value)
    assert str(refused.value).startswith("profile.yaml: ")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (needs(layers=[]), "expected either `layers` or `transformer`, got neither"),
        (needs(batch=0), "expected batch and sequence of at least 1, got 0, 1"),
        (needs(layers=[{**LAYER, "flops": float("nan")}]), "layers.block.flops: expected a number from 0 on"),
        (needs(layers=[{**LAYER, "flops": -1.0}]), "layers.block.flops: expected a number from 0 on"),
        (needs(layers=[{**LAYER, "flops": float("inf")}]), "layers.block.flops: expected a number from 0 on"),
        (needs(transformer=SHAPE), "expected either `layers` or `transformer`, got both"),
        (needs(layers=[], transformer=SHAPE, bf16_borders=True), "bf16_borders: expected `layers` of 32 bits"),
        (needs(sequence=0), "expected batch and sequence of at least 1, got 16, 0"),
        (needs(state_bytes=float("inf")), "state_bytes: expected a number from 0 on, got inf"),
        (needs(layers=[{**LAYER, "repeat": 0}]), "layers.block.repeat: expected at least 1, got 0"),
        (needs(state_bytes=-12), "state_bytes: expected a number from 0 on, got -12.0"),
        (needs(layers=[], transformer={**SHAPE, "hidden": -8}), "transformer.hidden: expected at least 1, got -8"),
        (needs(layers=[], transformer={**SHAPE, "blocks": 0}), "transformer.blocks: expected at least 1, got 0"),
        (needs(bath=3), "bath: unknown key"),
        (needs(layers=[LAYER, {**LAYER, "tied": "head"}]), "layers.block.tied: expected an earlier layer of at most"),
        (
            needs(layers=[LAYER, {**LAYER, "name": "head", "parameters": 1, "tied": "block"}]),
            "layers.head.tied: expected an earlier layer of at most as many parameters, got block",
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_is_refused(raw: dict[str, Any], said: str) -> None:
    """The sentence names the file and the key."""
    with pytest.raises(ConfigError) as refused:
        parse_model(raw, "model.yaml")
    assert said in str(refused.value)


def test_the_least_model_is_a_model() -> None:
    """One sample of one token, no optimizer state, and a head of as many parameters as its embedding."""
    head = {**LAYER, "name": "head", "repeat": 1, "tied": "block"}
    model = parse_model(needs(batch=1, state_bytes=0, layers=[{**LAYER, "repeat": 1, "flops": 0}, head]), "model.yaml")
    assert model.parameters == LAYER["parameters"] and model.ties == ((1, 0, LAYER["parameters"]),)
    shape = dict.fromkeys(SHAPE, 1)
    assert len(parse_model(needs(layers=[], transformer=shape), "model.yaml").chain) == 3


def test_parameters_that_layers_share_count_once() -> None:
    """GPT-2 has the 124 M of its publication with the embedding as its head."""
    raw = yaml.safe_load((INVENTORIES / "gpt-2.yaml").read_text())
    apart = parse_model(raw, "gpt-2")
    tied = parse_model({**raw, "transformer": {**raw["transformer"], "tied": True}}, "gpt-2")
    assert tied.parameters == pytest.approx(0.124e9, rel=0.01)
    assert tied.ties == ((13, 0, 50257 * 768),) and apart.ties == ()


@pytest.mark.parametrize("path", sorted(INVENTORIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_inventory_is_read(path: Path) -> None:
    """Each file of configs/inventories is a profile or a model, with its source in a comment."""
    text = path.read_text()
    raw = yaml.safe_load(text)
    assert text.startswith("# ")
    if "nodes" in raw:
        assert parse_profile(raw, path.name).places
    else:
        assert parse_model(raw, path.name).parameters > 1e8


@pytest.mark.parametrize(
    ("name", "billions", "blocks"),
    [
        ("llama-7b", 6.74, 32),
        ("llama-13b", 13.0, 40),
        ("llama-33b", 32.5, 60),
        ("llama-65b", 65.3, 80),
        ("gpt-2", 0.163, 12),
    ],
)  # fmt: skip
def test_models_have_their_parameters(name: str, billions: float, blocks: int) -> None:
    """As published, to 1 % (GPT-2 with a head of its own); Llama 33B has 60 blocks and not 40."""
    model = parse_model(yaml.safe_load((INVENTORIES / f"{name}.yaml").read_text()), name)
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert len(model.chain) == blocks + 2


@pytest.mark.parametrize(
    ("name", "devices", "tflops"), [("zorse-a", 20, 8948), ("zorse-b", 64, 8056), ("zorse-c", 128, 10240)]
)
def test_clusters_have_their_devices(name: str, devices: int, tflops: float) -> None:
    """As Zorse's Table 4 lists them; its own sums differ, which a comment of the file says."""
    profile = parse_profile(yaml.safe_load((INVENTORIES / f"{name}.yaml").read_text()), name)
    assert len(profile.places) == devices
    assert sum(profile.kind_of(d).tflops for d in profile.places) == tflops


def test_a_kind_that_lacks_one_layers_time_is_estimated() -> None:
    """Its plan rests on FLOP/s where one layer alone was not measured."""
    profile = parse_profile({**machines(kinds=kinds()), "measured": measured([1, 0])}, "a")
    layers = [LAYER, {**LAYER, "name": "head", "repeat": 1}]
    assert not is_estimated(profile, parse_model(needs(), "a"), "fast")
    assert is_estimated(profile, parse_model(needs(layers=layers), "a"), "fast")
    assert is_estimated(profile, parse_model(needs(), "a"), "slow")
