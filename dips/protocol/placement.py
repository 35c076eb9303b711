"""The placement of layers on slaves: whole layers, balanced by bytes; decided by `dips init` and `dips rebalance`, kept
in the ledger.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.protocol.manifest import Manifest

Placement = tuple[tuple[str, tuple[int, ...]], ...]  # (slave, its layers in manifest order)


def place_layers(manifest: Manifest, slaves: Sequence[str]) -> Placement:
    """Assign each layer, largest first, to the slave with the fewest bytes so far (at most 4/3 of the best balance).

    Raise ConfigError if there are more slaves than layers: every slave must answer orders, so one without a layer would
    only be one more that can fail.
    """
    _check_enough_layers(manifest, slaves)
    held: dict[str, list[int]] = {name: [] for name in slaves}
    load = dict.fromkeys(slaves, 0)
    largest_first = sorted(range(len(manifest.layers)), key=lambda i: (-manifest.layers[i].nbytes, i))
    for layer in largest_first:
        lightest = min(slaves, key=lambda name: (load[name], len(held[name])))
        held[lightest].append(layer)
        load[lightest] += manifest.layers[layer].nbytes
    return tuple((name, tuple(sorted(held[name]))) for name in slaves)


@dataclass(frozen=True, slots=True)
class LayerMove:
    """A layer that moves from one slave to another."""

    layer: int
    source: str
    target: str


def rebalance_layers(manifest: Manifest, placement: Placement, slaves: Sequence[str]) -> Placement:
    """Place the layers on other slaves with few moves: a layer stays unless its slave leaves or the move lowers the
    largest load.

    The same slaves keep their layers. Layers of slaves that leave are placed as by `place_layers`; then layers move to
    the lightest slave as long as it stays lighter than their slave was. No slave then holds more than twice what the
    heaviest would in the best balance (Finn and Horowitz 1979: 2 - 2/(n + 1)), and none is empty. The result is a fixed
    point.

    Raise ConfigError if there are more slaves than layers.
    """
    _check_enough_layers(manifest, slaves)
    before = dict(placement)
    if set(before) == set(slaves):
        return tuple((name, before[name]) for name in slaves)
    sizes = [layer.nbytes for layer in manifest.layers]
    held: _Held = {name: sorted((sizes[i], i) for i in before.get(name, ())) for name in slaves}
    load = {name: sum(size for size, _ in held[name]) for name in slaves}
    homeless = sorted((-sizes[i], i) for name, layers in placement if name not in held for i in layers)
    for minus_size, layer in homeless:
        _give_layer(held, load, min(slaves, key=lambda name: (load[name], len(held[name]))), (-minus_size, layer))
    while _move_one(held, load, slaves):
        pass
    return tuple((name, tuple(sorted(i for _, i in held[name]))) for name in slaves)


def moves_between(before: Placement, after: Placement) -> tuple[LayerMove, ...]:
    """Return the layers that change their slave, in the model's order."""
    holder = {layer: name for name, layers in before for layer in layers}
    moved = ((layer, name) for name, layers in after for layer in layers if holder[layer] != name)
    return tuple(LayerMove(layer, holder[layer], name) for layer, name in sorted(moved))


_Held = dict[str, list[tuple[float, int]]]  # of each slave: (bytes, layer), ascending


def _move_one(held: _Held, load: dict[str, float], slaves: Sequence[str]) -> bool:
    """Move a layer to the lightest slave from the heaviest with a small enough one; return False if there is none."""
    lightest = min(slaves, key=load.__getitem__)
    for name in _heaviest_first(load, slaves):
        gap = load[name] - load[lightest]
        half = bisect_left(held[name], (gap / 2, -1))  # a layer of half the gap evens out most
        near = [one for one in held[name][max(half - 1, 0) : half + 1] if one[0] < gap]
        if near:
            best = min(near, key=lambda one: abs(2 * one[0] - gap))
            held[name].remove(best)
            load[name] -= best[0]
            _give_layer(held, load, lightest, best)
            return True
    return False


def _heaviest_first(load: dict[str, float], slaves: Sequence[str]) -> Iterator[str]:
    """Iterate over slaves, the heaviest first; nearly always it has a layer to give, so the others are sorted only on
    demand.
    """
    heaviest = max(slaves, key=load.__getitem__)
    yield heaviest
    yield from sorted((name for name in slaves if name != heaviest), key=lambda name: -load[name])


def _give_layer(held: _Held, load: dict[str, float], name: str, one: tuple[float, int]) -> None:
    insort(held[name], one)
    load[name] += one[0]


def _check_enough_layers(manifest: Manifest, slaves: Sequence[str]) -> None:
    if len(slaves) > len(manifest.layers):
        raise ConfigError(
            f"slaves: expected at most {len(manifest.layers)}, one for each layer of the model, got {len(slaves)}"
        )
