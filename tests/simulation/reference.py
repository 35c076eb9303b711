"""The reference: θ, m and the penalty's statistics in plain Python, from what the ledger says and nothing else.

Different code from dips/outer and protocol/penalty.py on purpose: no NumPy arithmetic, one number after another, every
result rounded to fp32 by struct. If both agree bit for bit, it is not because they share a mistake.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import frexp, ldexp, sqrt
from statistics import median

from dips.codecs import Codec
from dips.ids import GENESIS, VersionId
from dips.protocol.gates.norms import student_quantile
from dips.protocol.options import PenaltyOptions
from dips.protocol.records import FoldRow, PenaltyRow, VersionCommitted
from dips.slave.ports import F32

Numbers = list[float]


def f32(x: float) -> float:
    """Round to fp32. One fp64 operation on fp32 values, rounded so, is the fp32 operation (53 ≥ 2·24 + 2 bits)."""
    rounded: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return rounded


def unpack(array: F32) -> Numbers:
    return list(struct.unpack(f"<{array.size}f", array.tobytes()))


def pack(numbers: Numbers) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def _round_bf16(x: float) -> float:
    """The nearest of the numbers with 8 bits, of two the even one."""
    if x == 0.0:
        return x
    mantissa, exponent = frexp(x)
    return ldexp(round(ldexp(mantissa, 8)), exponent - 8)


def weight_in(fold: FoldRow, layer: int) -> float:
    """What a push weighs in one layer."""
    weights = fold.layer_weights or (fold.weight,)
    return weights[layer if len(weights) > 1 else 0]


@dataclass(frozen=True)
class Content:
    """One version as the reference has it; `bytes_of` what a slave must hold, by layer: (θ, m)."""

    theta: dict[int, Numbers]
    momentum: dict[int, Numbers]
    bytes_of: dict[int, tuple[bytes, bytes]]


def _content(theta: dict[int, Numbers], momentum: dict[int, Numbers]) -> Content:
    return Content(theta, momentum, {layer: (pack(theta[layer]), pack(momentum[layer])) for layer in theta})


class LineageReference:
    """Every version of the lineage, made anew from its row."""

    def __init__(
        self, genesis: Mapping[int, F32], parameters: tuple[int, ...] = (), pull_codec: Codec = Codec.FP32
    ) -> None:
        """`parameters` of each layer, by their elements: of an update each is one block."""
        self._parameters, self._codec = parameters, pull_codec
        theta = {layer: unpack(a) for layer, a in genesis.items()}
        self.versions: dict[VersionId, Content] = {
            GENESIS: _content(theta, {l: [0.0] * len(x) for l, x in theta.items()})
        }

    def commit(self, row: VersionCommitted, contents: list[Mapping[int, F32]]) -> Content:
        """Take the outer step that the row tells; `contents` is what was pushed, in the order of the row's folds."""
        old = self.versions[row.parent]
        theta, momentum = dict[int, Numbers](), dict[int, Numbers]()
        pushed = [{layer: unpack(a) for layer, a in content.items()} for content in contents]
        for layer, numbers in old.theta.items():
            acc = self._sum(layer, numbers, row.folds, pushed)
            theta[layer], momentum[layer] = self._step(row, layer, numbers, acc, old.momentum[layer])
            if self._codec.lossy:
                self._round(row, numbers, theta[layer], momentum[layer])
        made = self.versions[row.version] = _content(theta, momentum)
        return made

    @staticmethod
    def _sum(layer: int, theta: Numbers, folds: tuple[FoldRow, ...], pushed: list[dict[int, Numbers]]) -> Numbers:
        """Σ w·(θ − θ_j), θ being the version's parent."""
        counts = weight_in(folds[0], layer) > 0
        acc = [f32(t - p) if counts else 0.0 for t, p in zip(theta, pushed[0][layer], strict=True)]
        for fold, content in zip(folds[1:], pushed[1:], strict=True):
            w = f32(weight_in(fold, layer))
            acc = [f32(a + f32(w * f32(t - p))) for a, t, p in zip(acc, theta, content[layer], strict=True)]
        return acc

    @staticmethod
    def _step(
        row: VersionCommitted, layer: int, theta: Numbers, acc: Numbers, momentum: Numbers
    ) -> tuple[Numbers, Numbers]:
        """g = s·acc; m′ = a·m + b·g; θ′ = θ − lr·(c·g + e·m′); where s is 0 nothing moves."""
        s, scales = row.step, row.step.scales
        of_layer = scales[layer if len(scales) > 1 else 0]
        scale, lr = f32(of_layer), f32(s.lr)
        a, b, c, e = map(f32, (s.a, s.b, s.c, s.e) if of_layer else (1.0, 0.0, 0.0, 0.0))
        next_theta, next_momentum = [], []
        for t, summed, m in zip(theta, acc, momentum, strict=True):
            g = f32(scale * summed)
            m_next = f32(f32(a * m) + f32(b * g))
            next_momentum.append(m_next)
            next_theta.append(f32(t - f32(lr * f32(f32(c * g) + f32(e * m_next)))))
        return next_theta, next_momentum

    def _round(self, row: VersionCommitted, old: Numbers, theta: Numbers, momentum: Numbers) -> None:
        """θ′ becomes θ and what travels of the change; m′ takes the rest, so that it comes back."""
        back = f32(row.step.returned)
        begin = 0
        for numel in self._parameters:
            block = range(begin, begin + numel)
            begin += numel
            change = {i: f32(theta[i] - old[i]) for i in block}
            top = max(abs(c) for c in change.values())
            step = f32(top / 127)
            for i, c in change.items():
                if self._codec is Codec.BF16:
                    update = _round_bf16(c)
                elif self._codec is not Codec.INT8:
                    raise ValueError(f"no reference of updates in {self._codec}")
                elif top < 2.0**-119:
                    update = 0.0
                else:
                    update = f32(round(f32(c * f32(1 / step))) * step)
                made = f32(old[i] + update)
                momentum[i] = f32(momentum[i] - f32(back * f32(theta[i] - made)))
                theta[i] = made

    def norm(self, version: VersionId, content: Mapping[int, F32], inner_steps: int) -> float:
        """G of a push against a version: Σ over layers ‖θ − θ_j‖₂, over √(inner steps)."""
        total = 0.0
        for layer, theta in self.versions[version].theta.items():
            total += sqrt(sum((t - p) ** 2 for t, p in zip(theta, unpack(content[layer]), strict=True)))
        return total / sqrt(inner_steps)


class PenaltyReference:
    """μ, σ and the rest of every cluster, moved by committed rows only."""

    def __init__(self, options: PenaltyOptions, genesis_norm: float) -> None:
        self.o, self.genesis_norm = options, genesis_norm
        self.rows: dict[str, PenaltyRow] = {}
        self.scores: list[tuple[float, ...]] = []

    def accepted(self, folds: tuple[FoldRow, ...], lineage: set[VersionId]) -> None:
        """One committed round's folds, in order; those from a base outside the lineage move no statistics."""
        limit = self.o.beta * min(self.o.e_cap, max([1.0, *(e for scores in self.scores for e in scores)]))
        armed: list[float] = []
        warm = [r for r in self.rows.values() if r.last_norm and not r.warm_left]  # as the round found them
        for fold in folds:
            row = self.row(fold.push.cluster)
            if fold.base not in lineage:
                self.rows[row.cluster] = replace(row, gated_in_a_row=0, quarantined=False, accepted=row.accepted + 1)
                continue
            g, n = fold.norm, row.n + 1
            if self._is_scored(row):
                armed.append(fold.score)
            if row.warm_left == 0 and row.n > 0 and "dips-paper" not in self.o.gates:
                least = (self.o.sigma_floor if row.n > 1 else 1.0) * row.mu
                g = min(g, row.mu + limit * max(row.sigma * self._spread(row.n), least, 1e-30))
            w, _left = max(self.o.alpha, 1 / n), max(0, row.warm_left - 1)
            mu = w * g + (1 - w) * row.mu
            sigma = sqrt((1 - self.o.alpha) * row.sigma**2 + self.o.alpha * (g - mu) ** 2)
            others = [r.last_norm for r in warm if r.cluster != row.cluster] if self._is_young(row) else []
            reference = self._slow(row.reference, fold.norm, row.accepted, median(others) if others else 0.0)
            steps = self._slow(row.steps, max(1, fold.inner_steps), row.accepted)
            self.rows[row.cluster] = PenaltyRow(
                row.cluster,
                n,
                mu,
                sigma,
                fold.norm,
                max(0, row.warm_left - 1),
                0,
                False,
                row.accepted + 1,
                reference,
                steps,
            )
        self.scores = [*self.scores, tuple(armed)][-self.o.history :]

    def _is_young(self, row: PenaltyRow) -> bool:
        return row.accepted < self.o.warmup_rounds and row.warm_left > 0

    def _is_scored(self, row: PenaltyRow) -> bool:
        """Whether the gate that has a score, of those that are drawn one at most, compares this row's norm."""
        if "dips-paper" in self.o.gates:
            return row.n >= 2 and row.sigma > 0
        return "dips" in self.o.gates and row.warm_left == 0 and row.n > 0

    def _spread(self, n: int) -> float:
        """What makes an unbiased σ of one of n residuals, each to a mean of itself and those before it, and a wide one.

        Every mean is written out as what each push weighs in it.
        """
        mean, weights = [1.0], [0.0]
        for k in range(2, n + 1):
            w = max(self.o.alpha, 1 / k)
            mean = [*((1 - w) * x for x in mean), w]
            residual = [*(-x for x in mean[:-1]), 1 - w]
            weights = [*((1 - self.o.alpha) * x for x in weights), self.o.alpha * sum(x * x for x in residual)]
        share, squares = sum(weights), sum(x * x for x in weights)
        if not share:
            return 0.0
        return sqrt((1 + sum(x * x for x in mean)) / share) * student_quantile(share**2 / squares) / 3

    def gated(
        self, cluster: str, decided: PenaltyRow, norm: float, inner_steps: int, rows: Mapping[str, PenaltyRow]
    ) -> None:
        """A gated push leaves μ and σ alone; after `gate_patience` in a row it may warm up again or be quarantined.

        rows  before anybody's patience of this round ended
        """
        row = self.row(cluster)
        row = replace(row, gated_in_a_row=row.gated_in_a_row + 1)
        if row.gated_in_a_row >= self.o.gate_patience and not row.broken:
            anew = self._warming(row, rows)
            kept = replace(row, quarantined=decided.quarantined, broken=decided.broken)
            if self._is_young(row) and decided.last_norm != row.last_norm:  # who are most, or alone, is not known here
                most = min(norm, self.genesis_norm / sqrt(max(1, inner_steps)))
                anew = replace(anew, last_norm=max(row.last_norm, most), accepted=max(2, row.accepted))
                anew = replace(anew, reference=max(row.reference, most))
            elif self._is_young(row) and (decided.reference != anew.reference or decided.accepted != row.accepted):
                anew = replace(anew, reference=max(row.reference, norm), accepted=max(2, row.accepted))
            row = anew if decided.gated_in_a_row == 0 else kept
        self.rows[cluster] = row

    def diverged(self, cluster: str) -> None:
        """A push that was not finite was kept back: as one that was gated for that."""
        row = self.row(cluster)
        row = replace(row, gated_in_a_row=row.gated_in_a_row + 1)
        if row.gated_in_a_row >= self.o.gate_patience:
            row = replace(row, quarantined=True, broken=True)
        self.rows[cluster] = row

    def readmitted(self, cluster: str) -> None:
        """An operator lifted the gate's quarantine: it warms up again."""
        self.rows[cluster] = self._warming(self.row(cluster), self.rows)

    def _warming(self, row: PenaltyRow, rows: Mapping[str, PenaltyRow]) -> PenaltyRow:
        """A cluster in a new warm-up: of its past what its hard cap is made of, which the others' norms may raise."""
        others = [r.last_norm for r in rows.values() if r.cluster != row.cluster and r.accepted and r.last_norm]
        reference = max([row.reference, *([median(others)] if others else [])])
        anew = replace(self.fresh(row.cluster), last_norm=row.last_norm, accepted=row.accepted)
        return replace(anew, reference=reference, steps=row.steps)

    def row(self, cluster: str) -> PenaltyRow:
        return self.rows.get(cluster) or self.fresh(cluster)

    def fresh(self, cluster: str) -> PenaltyRow:
        return PenaltyRow(cluster, 0, 0.0, 0.0, 0.0, self.o.warmup_rounds, 0, False, 0)

    def _slow(self, mean: float, value: float, accepted: int, known: float = 0.0) -> float:
        """A mean into which no value enters above twice itself, or above what the others are known to push."""
        entered = min(value, max(known, 2 * mean))
        return mean + max(self.o.alpha, 1 / (accepted + 1)) * (entered - mean) if mean else value


def same_statistics(a: PenaltyRow, b: PenaltyRow) -> bool:
    """Equal but for the last bits of their numbers."""
    reals = ("mu", "sigma", "last_norm", "reference", "steps")
    close = all(abs(getattr(a, r) - getattr(b, r)) <= 1e-9 * (1 + abs(getattr(a, r))) for r in reals)
    counts = ("cluster", "n", "warm_left", "gated_in_a_row", "quarantined", "accepted", "broken")
    return close and all(getattr(a, c) == getattr(b, c) for c in counts)
