"""The loss of a version: the mean of its pushes' losses by tokens, for people; None if no script gave one."""

from __future__ import annotations

from collections.abc import Iterable

from dips.protocol.records import FoldRow


def mean_loss(folds: Iterable[FoldRow]) -> float | None:
    """Return the mean loss by tokens; pushes without a loss, or without tokens, do not count."""
    pairs: list[tuple[int, float | None]] = [(fold.tokens, fold.loss) for fold in folds]
    told = [(tokens, loss) for tokens, loss in pairs if loss is not None]
    total = sum(tokens for tokens, _ in told)
    return sum(tokens * loss for tokens, loss in told) / total if total else None
