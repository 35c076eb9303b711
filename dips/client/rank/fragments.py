"""Fragments of a model: groups of layers that a push freezes, and a pull merges, at different inner steps.

All ranks cut alike, from the manifest alone. One push has one slot and one pull one pin whatever their fragments; the
rank alone staggers them (docs/guides/fragments.md). No torch, no socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from dips.errors import ConfigError

Fragments = tuple[tuple[int, ...], ...]  # layers of each, by their numbers in the manifest


class Ranged(Protocol):
    """A piece."""

    @property
    def layer(self) -> int: ...

    @property
    def length(self) -> int: ...


P = TypeVar("P", bound=Ranged)


def cut_fragments(sizes: Sequence[int], count: int) -> Fragments:
    """Deal layers of these sizes to `count` fragments of about the same size: the largest left to the smallest so far.

    Layers of one size are dealt in turn, as strides through the model. Raise ConfigError if there are fewer layers.
    """
    if count > len(sizes):
        raise ConfigError(
            f"fragments: {count} is more than the {len(sizes)} layers of the model, which are never cut; "
            f"expected at most {len(sizes)}"
        )
    dealt: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for layer in sorted(range(len(sizes)), key=lambda l: (-sizes[l], l)):
        least = min(range(count), key=lambda f: (filled[f], len(dealt[f]), f))
        dealt[least].append(layer)
        filled[least] += sizes[layer]
    return tuple(tuple(sorted(layers)) for layers in dealt)


class FragmentGate:
    """Which fragments of one rank's transfer may move, and which of a pull have arrived.

    The training thread opens, the transfer's thread counts; each number has one writer, and only rises.
    """

    def __init__(self, fragments: Fragments, pieces: Iterable[Ranged]) -> None:
        """The first fragment is open."""
        self._of_layer = {layer: number for number, layers in enumerate(fragments) for layer in layers}
        self.count, self.open = len(fragments), 1
        self._left = [0] * len(fragments)  # elements of a pull that are not here
        for piece in pieces:
            self._left[self._of_layer[piece.layer]] += piece.length

    def open_next(self) -> None:
        """One more may move."""
        assert self.open < self.count
        self.open += 1

    def group_pieces(self, pieces: Iterable[P]) -> list[list[P]]:
        """The pieces of each fragment."""
        groups: list[list[P]] = [[] for _ in range(self.count)]
        for piece in pieces:
            groups[self._of_layer[piece.layer]].append(piece)
        return groups

    def record_arrived(self, layer: int, length: int) -> None:
        """So many elements of a layer are in their place."""
        self._left[self._of_layer[layer]] -= length

    @property
    def arrived(self) -> int:
        """So many fragments are here, from the first on; of those that are open."""
        whole = (number for number in range(self.open) if self._left[number])
        return next(whole, self.open)
