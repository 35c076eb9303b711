"""Curves over tokens and over time, in bounded memory: the newest points as they are, older neighbours averaged."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dips.protocol.enums import OutcomeKind
from dips.view.points import RoundPoint

MOST_POINTS = 160  # of a curve's older part; at least half of it once it was full
RECENT_POINTS = 160  # newest, which are not averaged: what one sees when one looks closer
MOST_CURVES = 8  # of clusters; the first that brought a push
RUN_COLUMNS = ("loss", "delta_norm", "tokens_per_s")
PUSH_COLUMNS = ("loss", "score", "inner_steps", "tokens_per_s")
Values = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """`tokens` of the run and `wall` (Unix seconds) of the last round in it; the mean of each column's numbers."""

    tokens: int
    wall: float
    values: Values
    rounds: int = 1


class Curve:
    """The lines of one run or cluster: a column for each."""

    def __init__(self) -> None:
        self._recent: deque[CurvePoint] = deque()
        self._older: list[CurvePoint] = []
        self._each = 1  # rounds in a whole point of the older part

    def add_point(self, tokens: int, wall: float, values: Values) -> None:
        self._recent.append(CurvePoint(tokens, wall, values))
        if len(self._recent) > RECENT_POINTS:
            self._keep_older(self._recent.popleft())

    def _keep_older(self, point: CurvePoint) -> None:
        last = self._older[-1] if self._older else None
        if last is not None and last.rounds < self._each:
            self._older[-1] = _merge(last, point)
        else:
            self._older.append(point)
        if len(self._older) > MOST_POINTS:
            pairs = zip(self._older[::2], self._older[1::2], strict=False)
            odd = self._older[-1:] if len(self._older) % 2 else []
            self._older = [_merge(a, b) for a, b in pairs] + odd
            self._each *= 2

    def drop_above(self, tokens: int) -> None:
        """The versions that lay above are undone."""
        for points in (self._recent, self._older):
            while points and points[-1].tokens > tokens:
                points.pop()

    def list_points(self) -> list[CurvePoint]:
        return [*self._older, *self._recent]


class RunCurves:
    """The run's curve and one for each of the first clusters; `revision` rises with every change."""

    def __init__(self) -> None:
        self.run, self.clusters, self.revision = Curve(), dict[str, Curve](), 0

    def add_round(self, point: RoundPoint) -> None:
        """A round of the lineage, or one that made no version."""
        judged = [p for p in point.pushes if p.kind != OutcomeKind.SKIPPED]
        if point.run_tokens is None or not judged:
            return
        self.revision += 1
        if point.version is not None:
            self.run.add_point(point.run_tokens, point.wall, _read_columns(point, RUN_COLUMNS))
        for push in judged:
            if push.cluster not in self.clusters and len(self.clusters) < MOST_CURVES:
                self.clusters[push.cluster] = Curve()
            if push.cluster in self.clusters:
                self.clusters[push.cluster].add_point(point.run_tokens, point.wall, _read_columns(push, PUSH_COLUMNS))

    def drop_above(self, tokens: int) -> None:
        """A rollback: the lineage has only so many tokens now."""
        self.revision += 1
        for curve in (self.run, *self.clusters.values()):
            curve.drop_above(tokens)


def _read_columns(point: object, names: Sequence[str]) -> Values:
    return tuple(getattr(point, name) for name in names)


def _merge(a: CurvePoint, b: CurvePoint) -> CurvePoint:
    """Both as one; a number that one of them lacks is the other's."""
    values = tuple(_mean(x, a.rounds, y, b.rounds) for x, y in zip(a.values, b.values, strict=True))
    return CurvePoint(b.tokens, b.wall, values, a.rounds + b.rounds)


def _mean(x: float | None, n: int, y: float | None, m: int) -> float | None:
    if x is None or y is None:
        return y if x is None else x
    return (x * n + y * m) / (n + m)
