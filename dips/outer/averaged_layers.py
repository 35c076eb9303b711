"""The layers of a slave that hold buffers: averaged by tokens, not stepped.

Learning rate, momentum and clipping are for what gradients move. A buffer (a router's bias that balances experts, a
running mean) becomes Σ T_j·b_j / ΣT_j of the accepted pushes: the outer step with learning rate 1 and momentum 0, and
with c = 1/Σw for its scale, w being the weights of the folds, T_j / T_first. No norm contains them. What a lossy
pull_codec rounds away of them does not come back: there is no momentum to bring it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from dips.outer.pool import Arrays

LR, MOMENTUM, RETURNED = 1.0, 0.0, 0.0  # of their outer step; how much of what is rounded away goes into m′


class AveragedLayers:
    """Tells the two kinds of layers apart, and counts the weights of a round."""

    def __init__(self) -> None:
        self.layers: frozenset[int] = frozenset()
        self._weights = 0.0

    def split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """Those that are stepped, those that are averaged."""
        if not self.layers:
            return arrays, {}
        return (
            {i: array for i, array in arrays.items() if i not in self.layers},
            {i: array for i, array in arrays.items() if i in self.layers},
        )

    def leave_out(self, arrays: Arrays, squares: Iterable[float]) -> tuple[float, ...]:
        """The norms of all layers, 0 for a buffer's unless it is not finite: that must be seen."""
        pairs = zip(arrays, squares, strict=True)
        return tuple(0.0 if layer in self.layers and isfinite(square) else square for layer, square in pairs)

    def begin_weights(self) -> None:
        """A round's first push is folded."""
        self._weights = 1.0

    def add_weight(self, weight: float) -> None:
        """Another one is."""
        self._weights += weight

    @property
    def scale(self) -> float:
        """What makes a mean of the sum that was folded."""
        return 1.0 / self._weights
