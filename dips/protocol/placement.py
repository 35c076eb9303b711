"""Which slave holds which layer: whole layers, balanced by bytes; decided once, by `dips init`, kept in the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from dips.errors import ConfigError
from dips.protocol.manifest import Manifest

Placement = tuple[tuple[str, tuple[int, ...]], ...]  # (slave, its layers in manifest order)


def place_layers(manifest: Manifest, slaves: Sequence[str]) -> Placement:
    """Give each layer, largest first, to the slave that holds fewest bytes so far (at most 4/3 of the best balance).

    Raise ConfigError if there are more slaves than layers: a slave without a layer would vote without a stake.
    """
    if len(slaves) > len(manifest.layers):
        raise ConfigError(
            f"slaves: expected at most {len(manifest.layers)}, one for each layer of the model, got {len(slaves)}"
        )
    held: dict[str, list[int]] = {name: [] for name in slaves}
    load = dict.fromkeys(slaves, 0)
    largest_first = sorted(range(len(manifest.layers)), key=lambda i: (-manifest.layers[i].nbytes, i))
    for layer in largest_first:
        lightest = min(slaves, key=lambda name: (load[name], len(held[name])))
        held[lightest].append(layer)
        load[lightest] += manifest.layers[layer].nbytes
    return tuple((name, tuple(sorted(held[name]))) for name in slaves)
