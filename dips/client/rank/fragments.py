"""Fragments of a model: groups of layers that a push freezes, and a pull merges, at different inner steps.

All ranks cut alike, from the manifest alone. A push has one slot and a pull one pin for all its fragments; only the
ranks stagger them (docs/guides/fragments.md). No torch, no socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from dips.errors import ConfigError

Fragments = tuple[tuple[int, ...], ...]  # numbers of each fragment's layers in the manifest


class Ranged(Protocol):
    """A piece, with its layer and length."""

    @property
    def layer(self) -> int: ...

    @property
    def length(self) -> int: ...


P = TypeVar("P", bound=Ranged)


def cut_fragments(sizes: Sequence[int], count: int) -> Fragments:
    """Assign layers of these sizes to `count` fragments of similar size: the largest layer left to the smallest
    fragment so far.

    Layers of one size are assigned in turn, as strides through the model. Raises ConfigError if there are fewer layers.
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
    """Tracks which fragments of one rank's transfer may move, and which of a pull have arrived.

    The training thread opens fragments, the transfer's thread counts arrivals; each number has one writer and only
    rises.
    """

    def __init__(self, fragments: Fragments, pieces: Iterable[Ranged], interval: int = 0) -> None:
        """Open the first fragment; `interval` is the number of inner steps between two."""
        self._interval = interval
        self._of_layer = {layer: number for number, layers in enumerate(fragments) for layer in layers}
        self.count, self.open = len(fragments), 1
        self._left = [0] * len(fragments)  # elements of each fragment of a pull that have not arrived
        for piece in pieces:
            self._left[self._of_layer[piece.layer]] += piece.length

    def open_next(self) -> None:
        """Open the next fragment, so that it may move."""
        assert self.open < self.count
        self.open += 1

    def open_all(self) -> None:
        """Open all fragments."""
        self.open = self.count

    def steps_until_due(self, taken: int) -> int | None:
        """Return after how many inner steps the next fragment is due, of which `taken` are over; None: all are open."""
        return max(0, self.open * self._interval - taken) if self.open < self.count else None

    def group_pieces(self, pieces: Iterable[P]) -> list[list[P]]:
        """Return the pieces of each fragment."""
        groups: list[list[P]] = [[] for _ in range(self.count)]
        for piece in pieces:
            groups[self._of_layer[piece.layer]].append(piece)
        return groups

    def record_arrived(self, layer: int, length: int) -> None:
        """Count `length` elements of a layer as arrived."""
        self._left[self._of_layer[layer]] -= length

    @property
    def arrived(self) -> int:
        """The number of open fragments that have arrived completely, counted from the first without a gap."""
        whole = (number for number in range(self.open) if self._left[number])
        return next(whole, self.open)
