"""Loss over tokens and over time, in bounded memory: a full curve has its neighbours averaged and goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MOST_POINTS = 256  # of one curve; at least half of it once it was full
MOST_CURVES = 8  # of clusters; the first that brought a loss


class LossPoint(NamedTuple):
    """`tokens` and `wall` (Unix seconds) of the last version in it, the mean loss of all."""

    tokens: int
    wall: float
    loss: float
    versions: int = 1


class LossCurve:
    """One line of a plot."""

    def __init__(self) -> None:
        self._points: list[LossPoint] = []
        self._each = 1  # versions in a whole point

    def add_loss(self, tokens: int, wall: float, loss: float) -> None:
        last = self._points[-1] if self._points else None
        if last is not None and last.versions < self._each:
            self._points[-1] = _merge(last, LossPoint(tokens, wall, loss))
        else:
            self._points.append(LossPoint(tokens, wall, loss))
        if len(self._points) > MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            odd = self._points[-1:] if len(self._points) % 2 else []
            self._points = [_merge(a, b) for a, b in pairs] + odd
            self._each *= 2

    def drop_above(self, tokens: int) -> None:
        """The versions that lay above are undone."""
        while self._points and self._points[-1].tokens > tokens:
            self._points.pop()

    def list_points(self) -> list[LossPoint]:
        return list(self._points)


class LossCurves:
    """The run's curve and one for each of the first clusters; `revision` rises with every change."""

    def __init__(self) -> None:
        self.run, self.clusters, self.revision = LossCurve(), dict[str, LossCurve](), 0

    def add_version(self, tokens: int, wall: float, losses: Iterable[tuple[str, int, float | None]]) -> None:
        """A version of `tokens` in all was made of pushes: (cluster, tokens, mean loss or None)."""
        told = [(cluster, weight, loss) for cluster, weight, loss in losses if loss is not None and weight > 0]
        if not told:
            return
        self.revision += 1
        total = sum(weight for _, weight, _ in told)
        self.run.add_loss(tokens, wall, sum(weight * loss for _, weight, loss in told) / total)
        for cluster, _, loss in told:
            if cluster not in self.clusters and len(self.clusters) < MOST_CURVES:
                self.clusters[cluster] = LossCurve()
            if cluster in self.clusters:
                self.clusters[cluster].add_loss(tokens, wall, loss)

    def drop_above(self, tokens: int) -> None:
        """A rollback: the lineage has only so many tokens now."""
        self.revision += 1
        for curve in (self.run, *self.clusters.values()):
            curve.drop_above(tokens)


def _merge(a: LossPoint, b: LossPoint) -> LossPoint:
    versions = a.versions + b.versions
    return LossPoint(b.tokens, b.wall, (a.loss * a.versions + b.loss * b.versions) / versions, versions)
