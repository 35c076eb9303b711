"""Which slave holds which layer, and which layers move when slaves come and go."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.errors import ConfigError
from dips.protocol.manifest import Manifest
from dips.protocol.placement import (
    LayerMove,
    Placement,
    _heaviest_first,
    moves_between,
    place_layers,
    rebalance_layers,
)


def manifest_of(sizes: list[int]) -> Manifest:
    return Manifest.from_shapes((f"layer.{i:06}.w", (size,)) for i, size in enumerate(sizes))


def loads(manifest: Manifest, placement: Placement) -> dict[str, int]:
    return {name: sum(manifest.layers[i].numel for i in layers) for name, layers in placement}


def names(count: int) -> list[str]:
    return [f"s{i}" for i in range(count)]


def test_two_become_three_become_two() -> None:
    """A third slave takes a third from the other two; when it goes, they take its layers, and nothing else moves."""
    manifest = manifest_of([4] * 6)
    two = place_layers(manifest, names(2))
    three = rebalance_layers(manifest, two, names(3))
    assert loads(manifest, three) == {"s0": 8, "s1": 8, "s2": 8}
    moved = moves_between(two, three)
    assert len(moved) == 2 and {m.target for m in moved} == {"s2"} and {m.source for m in moved} == {"s0", "s1"}
    again = rebalance_layers(manifest, three, names(2))
    assert loads(manifest, again) == {"s0": 12, "s1": 12}
    assert all(m.source == "s2" for m in moves_between(three, again))


def test_the_same_slaves_keep_their_layers() -> None:
    """In whatever order the file names them, and however unbalanced they are."""
    manifest = manifest_of([1, 1, 1, 9])
    crooked: Placement = (("a", (0, 1, 3)), ("b", (2,)))
    assert rebalance_layers(manifest, crooked, ["b", "a"]) == (("b", (2,)), ("a", (0, 1, 3)))
    assert moves_between(crooked, (("b", (2,)), ("a", (0, 1, 3)))) == ()


def test_all_slaves_may_be_other_ones() -> None:
    """Nothing stays; every layer is moved once, by name."""
    manifest = manifest_of([3, 2])
    moved = moves_between(
        place_layers(manifest, ["a"]), rebalance_layers(manifest, place_layers(manifest, ["a"]), ["c", "b"])
    )
    assert moved == (LayerMove(0, "a", "c"), LayerMove(1, "a", "b"))


def test_more_slaves_than_layers_are_refused() -> None:
    """A slave without a layer would vote without a stake."""
    manifest = manifest_of([1, 1])
    with pytest.raises(ConfigError, match="expected at most 2, one for each layer of the model, got 3"):
        rebalance_layers(manifest, place_layers(manifest, ["a"]), names(3))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=4, max_size=9), st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_any_sequence_of_slaves_is_whole_balanced_and_at_rest(sizes: list[int], counts: list[int]) -> None:
    """After any coming and going every layer has one slave, no slave is empty or holds over twice the best balance's
    most, and the same rebalance again moves nothing.
    """
    manifest = manifest_of(sizes)
    placement = place_layers(manifest, names(counts[0]))
    for count in counts[1:]:
        before, placement = placement, rebalance_layers(manifest, placement, names(count))
        assert sorted(i for _, layers in placement for i in layers) == list(range(len(sizes)))
        assert all(layers for _, layers in placement) and [name for name, _ in placement] == names(count)
        if len(before) != count:
            assert max(loads(manifest, placement).values()) <= 2 * best_balance(sizes, count)
        assert rebalance_layers(manifest, placement, names(count)) == placement
        assert moves_between(placement, placement) == ()


def best_balance(sizes: list[int], count: int) -> int:
    """The dumb twin: try all placements (of at most six layers; a lower bound beyond)."""
    if len(sizes) > 6:
        return max(max(sizes), -(-sum(sizes) // count))
    return min(
        max(sum(s for s, at in zip(sizes, where, strict=True) if at == slave) for slave in range(count))
        for where in product(range(count), repeat=len(sizes))
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_the_heaviest_gives_first(loads: list[int]) -> None:
    """Each is asked once, and the least layers move if it is the one with the most."""
    load = dict(zip(names(len(loads)), map(float, loads), strict=True))
    asked = list(_heaviest_first(load, names(len(loads))))
    assert [load[name] for name in asked] == sorted(loads, reverse=True) and sorted(asked) == sorted(load)


def test_many_slaves_are_planned() -> None:
    """One slave's 3,000 layers go to 300: no two differ by more than twice."""
    manifest = manifest_of([1 + i % 7 for i in range(3_000)])
    before = place_layers(manifest, names(1))
    after = rebalance_layers(manifest, before, names(300))
    assert max(loads(manifest, after).values()) <= 2 * min(loads(manifest, after).values())
