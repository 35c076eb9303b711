"""How much each replica counts in each layer of a sync, and the layer's outer step (EDiT §3.2).

The rules are those of the parameter servers (dips/protocol): a replica takes the place of a cluster, a sync that of a
round in which all push together. Every rank computes this from the same numbers, so all come to the same result without
a message. The pseudo-gradient is old − new, as in the paper's equation 9 and not as in its Algorithm 2.

Pure: no torch, no clock, no messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf, isfinite, sqrt
from typing import Any

from dips.config import Shared
from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.outer_step import Factors, OuterStep
from dips.protocol.enums import GateName
from dips.protocol.gates.norms import norm_per_step, score_layer
from dips.protocol.penalty import LARGEST_NORM, move_layer
from dips.protocol.records import LayerStatistics
from dips.protocol.rules import (
    WEIGHTS,
    LayerShare,
    StepRound,
    clip_layers,
    find_merge,
    find_step,
    rate_of_clusters,
    scale_layer,
    scale_mean,
    scale_softmax,
    weigh_last,
)

WITHOUT_NORM = (scale_mean, scale_softmax)  # scales that do not depend on the norm of the sum
NEAR_LIMIT = 1e-6  # share of the clip's limit: a bound so near it may be above it by rounding
UNKNOWN = -inf  # a sum whose norm was not needed


@dataclass(frozen=True, slots=True)
class Interval:
    """One replica's training since the last sync."""

    inner_steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LayerMerge:
    """How the replicas' pseudo-gradients of one layer are added up; tuples are in the order of the sync dim."""

    shares: tuple[LayerShare | None, ...]  # None: left out
    weights: tuple[float, ...]  # 0 for those left out
    scores: tuple[float, ...]  # norms as the gate compares them; inf: not finite

    @property
    def has_any(self) -> bool:
        """Whether some replica counts; if none does, the layer stays as it was after the last sync."""
        return any(self.weights)


class ReplicaMerges:
    """The rules of a sync, and the statistics of each replica's layers."""

    def __init__(self, rules: Shared, replicas: int, layers: Sequence[str]) -> None:
        """Raises ConfigError for a rule that needs the whole model before the first layer is known.

        layers  a name for each layer, the same in every checkpoint of the model
        """
        outer, gates = rules.outer, rules.penalty.gates
        self._outer, self._options = outer, rules.penalty.make_options()
        self._merge, self._layers = find_merge(outer.merge), layers
        if (outer.clip.norm is not None and not outer.clip.per_layer) or outer.clip.relative is not None:
            raise ConfigError(
                f"outer.clip: expected none, or a norm with per_layer: true, got {outer.clip}: layers are synchronised "
                "one by one, and the norm of the whole model is not known yet"
            )
        if self._merge.blocks_only:
            raise ConfigError(f"outer.merge: {outer.merge} is not made for a mesh: expected mean, edit or edit-paper")
        if others := [gate for gate in gates if gate != GateName.EDIT]:
            raise ConfigError(
                f"penalty.gates: expected edit or none, got {', '.join(others)}: the others judge a whole "
                "model, and here each layer is judged when its turn comes"
            )
        self.has_momentum = outer.has_momentum
        self._lr = rate_of_clusters(replicas) if isinstance(outer.lr, str) else outer.lr
        self._numbers = find_step(outer.step)(StepRound(outer.momentum, 1.0))
        self._statistics = [[LayerStatistics()] * replicas for _ in layers]
        self.syncs = 0

    def weigh_layer(self, layer: int, squares: Sequence[float], intervals: Sequence[Interval]) -> LayerMerge:
        """Return the weight of each replica in one layer.

        squares  ‖old − new‖² of the layer, for each replica; NaN or inf leaves it out
        """
        scores, shares = list[float](), list[LayerShare | None]()
        for sq, of, known in zip(squares, intervals, self._statistics[layer], strict=True):
            finite = 0 <= sq < LARGEST_NORM**2
            scores.append(norm_per_step(sq, of.inner_steps) if finite else inf)
            weight = WEIGHTS[self._outer.weights](max(1, of.tokens))
            counts = finite and not self._is_flagged(scores[-1], known)
            shares.append(LayerShare(weight, sqrt(sq), of.inner_steps) if counts else None)
        weights = tuple(weigh_last(self._merge, shares[:i], share) for i, share in enumerate(shares))
        return LayerMerge(tuple(shares), weights, tuple(scores))

    def needs_norm(self, merge: LayerMerge) -> bool:
        """Whether the norm of the weighted sum must be measured: not if by the triangle inequality no clip can bind."""
        if self._merge.scale not in WITHOUT_NORM:
            return merge.has_any
        bound = sum(w * share.norm for w, share in zip(merge.weights, merge.shares, strict=True) if share is not None)
        if not bound < LARGEST_NORM:
            return True
        scale, limit = scale_layer(self._merge, merge.shares, merge.weights, 0.0), self._outer.clip.norm
        return limit is not None and scale * bound > (1.0 - NEAR_LIMIT) * limit

    def step_layer(self, merge: LayerMerge, acc_sq: float = UNKNOWN) -> OuterStep:
        """Return the layer's outer step; one of scale 0, which leaves the layer as it was, if no replica counts.

        acc_sq  ‖Σ w·(old − new)‖², if `needs_norm`; a sum that is not finite does not count
        """
        if not merge.has_any or (acc_sq != UNKNOWN and not isfinite(acc_sq)):
            return OuterStep((0.0,), self._lr, *self._numbers).of_layer(0)
        scales: Factors = (scale_layer(self._merge, merge.shares, merge.weights, sqrt(max(0.0, acc_sq))),)
        if acc_sq != UNKNOWN:
            scales = clip_layers(scales, (acc_sq,), self._outer.clip.norm).scales[:1]
        return OuterStep(scales, self._lr, *self._numbers)

    def keep_statistics(self, merges: Sequence[LayerMerge]) -> None:
        """Keep the statistics of a sync that is over on this rank; one that failed leaves no trace."""
        self.syncs += 1
        if GateName.EDIT not in self._options.gates:
            return
        for known, merge in zip(self._statistics, merges, strict=True):
            judged = zip(known, merge.scores, merge.shares, strict=True)
            known[:] = [move_layer(layer, score, share is None, self._options) for layer, score, share in judged]

    def _is_flagged(self, score: float, known: LayerStatistics) -> bool:
        if GateName.EDIT not in self._options.gates or self.syncs < self._options.warmup_rounds:
            return False
        return score_layer(score, known, self._options) > self._options.beta

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as numbers and names."""
        pairs = zip(self._layers, self._statistics, strict=True)
        return {"syncs": self.syncs, "layers": {name: [asdict(of) for of in known] for name, known in pairs}}

    def load_json(self, saved: Mapping[str, Any]) -> None:
        """Take what `to_json` returned; a replica, or a layer, that was not there then begins with none."""
        self.syncs = int(saved["syncs"])
        for name, known in zip(self._layers, self._statistics, strict=True):
            of = [LayerStatistics(**each) for each in saved["layers"].get(name, ())][: len(known)]
            known[:] = [*of, *[LayerStatistics()] * (len(known) - len(of))]
