"""The layers of a slave that hold buffers: averaged by tokens, not stepped.

Learning rate, momentum, clipping and the rules that weigh pushes are for what gradients move. A buffer (a router's bias
that balances experts, a running mean) becomes Σ T_j·b_j / ΣT_j of the accepted pushes: the outer step with learning
rate 1 and no momentum, and with 1/Σw for its scale, w being T_j / T_first. No norm contains them. What a lossy
pull_codec rounds away of them does not come back: there is no momentum to bring it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from dips.outer.pool import Arrays
from dips.outer_step import Factors, OuterStep, factor_at


class AveragedLayers:
    """Tells the two kinds of layers apart, and counts the weights of a round."""

    def __init__(self) -> None:
        self.layers: frozenset[int] = frozenset()
        self._weights = 0.0

    def leave_out(self, arrays: Arrays, squares: Iterable[float]) -> tuple[float, ...]:
        """The norms of all layers, 0 for a buffer's unless it is not finite: that must be seen."""
        pairs = zip(arrays, squares, strict=True)
        return tuple(0.0 if layer in self.layers and isfinite(square) else square for layer, square in pairs)

    def weigh_layers(self, arrays: Arrays, weight: float, layer_weights: Factors) -> dict[int, float]:
        """Return the weight of a push in each layer; `layer_weights`, if there are any, do not apply to buffers."""
        if not layer_weights:
            return dict.fromkeys(arrays, weight)
        return {
            layer: weight if layer in self.layers else factor_at(layer_weights, place)
            for place, layer in enumerate(arrays)
        }

    def begin_weights(self) -> None:
        """A round's first push is folded."""
        self._weights = 1.0

    def add_weight(self, weight: float) -> None:
        """Another one is."""
        self._weights += weight

    def step_layers(self, arrays: Arrays, step: OuterStep) -> dict[int, OuterStep]:
        """The step of each layer: a buffer's makes a mean of the sum that was folded."""
        mean = OuterStep((1.0 / self._weights,), lr=1.0, a=0.0, b=1.0, c=1.0, e=0.0)
        return {layer: mean if layer in self.layers else step.of_layer(place) for place, layer in enumerate(arrays)}
