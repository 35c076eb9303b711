"""The reference: θ, m and the penalty's statistics in plain Python, from what the ledger says and nothing else.

Different code from dips/outer and protocol/penalty.py on purpose: no NumPy arithmetic, one number after another, every
result rounded to fp32 by struct. If both agree bit for bit, it is not because they share a mistake.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt

from dips.ids import GENESIS, VersionId
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

    def __init__(self, genesis: Mapping[int, F32]) -> None:
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
            theta[layer], momentum[layer] = self._step(row, numbers, acc, old.momentum[layer])
        made = self.versions[row.version] = _content(theta, momentum)
        return made

    @staticmethod
    def _sum(layer: int, theta: Numbers, folds: tuple[FoldRow, ...], pushed: list[dict[int, Numbers]]) -> Numbers:
        acc = [f32(t - p) for t, p in zip(theta, pushed[0][layer], strict=True)]
        for fold, content in zip(folds[1:], pushed[1:], strict=True):
            w = f32(fold.weight)
            acc = [f32(a + f32(w * f32(t - p))) for a, t, p in zip(acc, theta, content[layer], strict=True)]
        return acc

    @staticmethod
    def _step(row: VersionCommitted, theta: Numbers, acc: Numbers, momentum: Numbers) -> tuple[Numbers, Numbers]:
        scale, lr, mu = f32(row.scale), f32(row.lr), f32(row.momentum)
        next_theta, next_momentum = [], []
        for t, a, m in zip(theta, acc, momentum, strict=True):
            g = f32(scale * a)
            m_next = f32(f32(mu * m) + g)
            next_momentum.append(m_next)
            next_theta.append(f32(t - f32(lr * f32(g + f32(mu * m_next)))))
        return next_theta, next_momentum

    def norm(self, version: VersionId, content: Mapping[int, F32], inner_steps: int) -> float:
        """G of a push against a version: Σ over layers ‖θ − θ_j‖₂, over √(inner steps)."""
        total = 0.0
        for layer, theta in self.versions[version].theta.items():
            total += sqrt(sum((t - p) ** 2 for t, p in zip(theta, unpack(content[layer]), strict=True)))
        return total / sqrt(inner_steps)


class PenaltyReference:
    """μ, σ and the rest of every cluster, moved by committed rows only."""

    def __init__(self, options: PenaltyOptions) -> None:
        self.o = options
        self.rows: dict[str, PenaltyRow] = {}
        self.scores: list[tuple[float, ...]] = []

    def accepted(self, folds: tuple[FoldRow, ...], lineage: set[VersionId]) -> None:
        """One committed round's folds, in order; those from a base outside the lineage move no statistics."""
        limit = self.o.beta * min(self.o.e_cap, max([1.0, *(e for scores in self.scores for e in scores)]))
        armed: list[float] = []
        for fold in folds:
            row = self.row(fold.push.cluster)
            if fold.base not in lineage:
                self.rows[row.cluster] = replace(row, gated_in_a_row=0, quarantined=False, accepted=row.accepted + 1)
                continue
            g, n = fold.norm, row.n + 1
            if row.warm_left == 0 and row.n > 0:
                armed.append(fold.score)
                sigma = row.sigma / sqrt(1 - (1 - self.o.alpha) ** row.n)
                g = min(g, row.mu + limit * max(sigma, self.o.sigma_floor * row.mu, 1e-30))
            w = max(self.o.alpha, 1 / n)
            mu = w * g + (1 - w) * row.mu
            sigma = sqrt((1 - self.o.alpha) * row.sigma**2 + self.o.alpha * (g - mu) ** 2)
            warm = max(0, row.warm_left - 1)
            self.rows[row.cluster] = PenaltyRow(row.cluster, n, mu, sigma, fold.norm, warm, 0, False, row.accepted + 1)
        self.scores = [*self.scores, tuple(armed)][-self.o.history :]

    def gated(self, cluster: str, decided: PenaltyRow) -> None:
        """A gated push leaves μ and σ alone; after `gate_patience` in a row it may warm up again or be quarantined."""
        row = self.row(cluster)
        row = replace(row, gated_in_a_row=row.gated_in_a_row + 1)
        if row.gated_in_a_row >= self.o.gate_patience:
            anew = PenaltyRow(cluster, 0, row.mu, 0.0, row.last_norm, self.o.warmup_rounds, 0, False, row.accepted)
            row = anew if decided.gated_in_a_row == 0 else replace(row, quarantined=decided.quarantined)
        self.rows[cluster] = row

    def row(self, cluster: str) -> PenaltyRow:
        known = self.rows.get(cluster)
        return known or PenaltyRow(cluster, 0, 0.0, 0.0, 0.0, self.o.warmup_rounds, 0, False, 0)


def same_statistics(a: PenaltyRow, b: PenaltyRow) -> bool:
    """Equal but for the last bits of μ and σ."""
    close = all(
        abs(x - y) <= 1e-9 * (1 + abs(x)) for x, y in ((a.mu, b.mu), (a.sigma, b.sigma), (a.last_norm, b.last_norm))
    )
    counts = ("cluster", "n", "warm_left", "gated_in_a_row", "quarantined", "accepted")
    return close and all(getattr(a, c) == getattr(b, c) for c in counts)
