"""What must be true after any failure, worked out from the ledger alone: θ of every version, tokens, ranges, lineage.

The reference is the outer step in ten lines: a constant model is one number, so a version is one number, and m
another. A version's parent is in its row, so a history with undone branches is predicted as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import sqrt

import numpy as np

from dips.ids import GENESIS, VersionId
from dips.protocol.records import FoldRow
from dips.protocol.rules import MOST_TIMES
from dips.view.points import RoundHistory
from tests.chaos.train_chaos import NUMEL, START, constant

LR, MOMENTUM, CLIP = 0.7, 0.8, 20.0
TOLERANCE = 2e-6  # of θ, absolute: hundreds of steps of fp32, whose errors momentum forgets


def predict(rounds: Iterable[RoundHistory]) -> dict[str, float]:
    """θ of every version that the ledger names, undone ones too."""
    f = np.float32
    made = {GENESIS: (f(START), f(0))}
    for r in rounds:
        if r.version is None:
            continue
        assert r.parent is not None
        theta, m = made[r.parent]
        mean = _mean(float(theta), r.folds)
        g = f(mean * min(1.0, CLIP / max(abs(mean) * sqrt(NUMEL), 1e-30)))
        m = f(MOMENTUM) * m + g
        made[r.version] = (theta - f(LR) * (g + f(MOMENTUM) * m), m)
    return {str(version): float(theta) for version, (theta, _) in made.items()}


def _mean(theta: float, folds: Sequence[FoldRow]) -> float:
    total = sum(fold.tokens for fold in folds)
    pushed = [float(np.float32(constant(f.push.cluster, f.base.version, f.base.round))) for f in folds]
    return sum(fold.tokens / total * (theta - p) for fold, p in zip(folds, pushed, strict=True))


def check_lineage(rounds: Sequence[RoundHistory], lineage: Sequence[VersionId]) -> None:
    """Versions count up along parents from v0@r0, rounds never repeat, a row's tokens are those of its folds.

    Of a cluster that was cut off for long MOST_TIMES what one brought before count; which one, the simulation knows.
    """
    assert lineage[0] == GENESIS
    for parent, child in pairwise(lineage):
        assert child.version == parent.version + 1 and child.round > parent.round, f"{parent} before {child}"
    assert len({r.round for r in rounds}) == len(rounds)
    capped = set[int]()
    for r in rounds:
        accepted = {o.push: o.tokens for o in r.outcomes if o.kind == "accepted"}
        counted = {f.push: f.tokens for f in r.folds}
        assert counted.keys() == accepted.keys(), f"round {r.round}: folds are not what was accepted"
        wrong = {p: n for p, n in counted.items() if n != accepted[p] and not (n < accepted[p] and n in capped)}
        assert not wrong, f"round {r.round}: of {accepted} count {counted}"
        assert r.tokens == sum(counted.values())
        capped |= {MOST_TIMES * tokens for tokens in counted.values()}
        assert r.version is None or r.folds, f"{r.version} was made of nothing"


def check_once(rounds: Sequence[RoundHistory], lineage: Sequence[VersionId]) -> None:
    """No push and no data range is in two versions of the lineage; nothing is accepted and gated as well."""
    ours = set(lineage)
    folds = [f for r in rounds if r.version in ours for f in r.folds]
    twice = [push for push, n in Counter(f.push for f in folds).items() if n > 1]
    assert not twice, f"folded twice: {twice}"
    settled = Counter(number for r in rounds for o in r.outcomes if o.kind != "skipped" for number in o.ranges)
    again = [number for number, n in settled.items() if n > 1]
    assert not again, f"ranges settled twice: {again}"
    trained = Counter(number for f in folds for number in f.ranges)
    assert all(n == 1 for n in trained.values())


def check_numbers(seen: Iterable[tuple[str, float]], predicted: Mapping[str, float], who: str) -> None:
    """Every version that a rank installed is in the ledger, and is the reference's number."""
    for version, number in seen:
        assert version in predicted, f"{who} was served {version}, which has no row"
        assert abs(number - predicted[version]) < TOLERANCE, (
            f"{who} at {version}: {number}, expected {predicted[version]}"
        )
