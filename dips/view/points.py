"""A run as points, for who draws or tabulates it: `dips plot`, `master.track`, the page's curves, all from the ledger's
rounds and all by `PointMaker`. Pure.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dips.dataclass import dataclass
from dips.ids import GENESIS, VersionId
from dips.outer_step import NO_STEP, OuterStep
from dips.protocol.enums import OutcomeKind
from dips.protocol.records import FoldRow, OutcomeRow

VERSIONS_KEPT = 10_000  # newest, whose tokens are known: no rollback goes farther


@dataclass(frozen=True, slots=True)
class ResultHistory:
    """The numbers that the process of `master.on_version` printed for a version."""

    ok: bool
    reason: str
    numbers: dict[str, float]
    seconds: float
    wall: float


@dataclass(frozen=True, slots=True)
class RoundHistory:
    """One round, as it ended; times are Unix seconds."""

    round: int
    kind: str  # "applied" | "skipped" | "unchanged" | "unfinished" (open now, or its master died)
    reason: str
    opened: float
    ended: float | None
    version: VersionId | None  # applied: what it made
    parent: VersionId | None
    tokens: int  # accepted
    step: OuterStep = NO_STEP  # by which it was made
    delta_norm: float = 0.0  # of the merged pseudo-gradient, before clipping
    clipped: bool = False
    folds: tuple[FoldRow, ...] = ()
    outcomes: tuple[OutcomeRow, ...] = ()
    durable: bool = False  # applied: it lay complete on every disk
    undone: str | None = None  # applied: why it was rolled back; None if it is in the lineage
    recovered: str | None = None  # applied: of what an operator made it (`dips recover`); None if it was made by pushes
    result: ResultHistory | None = None  # applied: of its process (`master.on_version`); None if it had none


@dataclass(frozen=True, slots=True)
class PushPoint:
    """One push, as its round ended. A number that the ledger does not have is None, and empty in the CSV."""

    round: int
    version: VersionId | None  # that the round made
    kind: str  # accepted | gated | skipped
    undone: bool  # its version was rolled back
    cluster: str
    wall: float  # Unix seconds of the round's end
    seconds: float  # since the first round opened
    run_tokens: int  # accepted by the lineage up to here
    tokens: int  # of this push
    inner_steps: int
    loss: float | None  # mean of its inner steps; of accepted pushes
    norm: float
    score: float
    tokens_per_s: float | None  # since the cluster's push before


@dataclass(frozen=True, slots=True)
class RoundPoint:
    """One round that ended, with its pushes."""

    round: int
    kind: str
    version: VersionId | None
    undone: bool
    wall: float
    seconds: float
    run_tokens: int | None  # of the version's lineage, or of the one before; None: too long ago to be known
    delta_norm: float | None
    clipped: bool
    loss: float | None  # the mean of its accepted pushes by tokens
    tokens_per_s: float | None  # since the version before
    pushes: tuple[PushPoint, ...]


@dataclass(frozen=True, slots=True)
class ResultPoint:
    """One number that the process of a version brought; without a name it brought none, and `reason` says why."""

    round: int
    version: VersionId
    undone: bool
    wall: float  # of the version
    seconds: float
    run_tokens: int
    name: str
    value: float | None
    reason: str


class PointMaker:
    """Takes rounds in their order, from the run's first on, or from where `begin` says."""

    def __init__(self) -> None:
        self._began: float | None = None  # Unix seconds
        self._tokens = {GENESIS: 0}  # accepted by each version's lineage: one that was rolled back counts no further
        self._head_tokens: int | None = 0  # of the version made last, of those that are not undone
        self._made_at: dict[VersionId, float] = {}
        self._pushed_at: dict[str, float] = {}  # by cluster

    def begin(self, version: VersionId, tokens: int) -> None:
        """Rounds follow that go on from this version, whose lineage has accepted so many tokens."""
        self._tokens, self._head_tokens = {version: tokens}, tokens

    def go_back(self, version: VersionId) -> int | None:
        """Rounds follow a rollback to this version; return the tokens that its lineage has accepted, None if it is too
        old for them to be known.
        """
        self._head_tokens = self._tokens.get(version)
        return self._head_tokens

    def make_point(self, r: RoundHistory) -> RoundPoint | None:
        """The round as a point; None of one that has not ended."""
        self._began = r.opened if self._began is None else self._began
        if r.ended is None:
            return None
        rate, tokens = None, self._head_tokens
        if r.version is not None:
            rate = self._count_version(r.version, r.parent or GENESIS, r.tokens, r.ended)
            tokens = self._tokens.get(r.version)
            self._head_tokens = tokens if r.undone is None else self._head_tokens
        at = (r.ended, r.ended - self._began, tokens)
        return RoundPoint(
            r.round, r.kind, r.version, r.undone is not None, *at, r.delta_norm if r.version is not None else None,
            r.clipped, mean_loss(r.folds), rate, tuple(self._push_points(r, *at)),
        )  # fmt: skip

    def make_results(self, r: RoundHistory) -> list[ResultPoint]:
        """A point for each number that the round's version brought, and one for a process that failed."""
        if r.result is None or r.version is None or r.ended is None:
            return []
        named = r.result.numbers.items() if r.result.ok else [("", None)]
        seconds, tokens = r.ended - (self._began or r.ended), self._tokens.get(r.version, 0)
        at = (r.round, r.version, r.undone is not None, r.ended, seconds, tokens)
        return [ResultPoint(*at, name, value, r.result.reason) for name, value in named]

    def _count_version(self, version: VersionId, parent: VersionId, tokens: int, ended: float) -> float | None:
        """Note a version; return its tokens a second."""
        before, since = self._tokens.get(parent), self._made_at.get(parent)
        if before is not None:
            self._tokens[version] = before + tokens
        self._made_at[version] = ended
        for kept in (self._tokens, self._made_at):
            if len(kept) > VERSIONS_KEPT:
                del kept[next(iter(kept))]
        return _rate_of(tokens, since, ended)

    def _push_points(
        self, r: RoundHistory, ended: float, seconds: float, run_tokens: int | None
    ) -> Iterator[PushPoint]:
        folds = {fold.push: fold for fold in r.folds}
        for o in r.outcomes:
            fold, since = folds.get(o.push), self._pushed_at.get(o.push.cluster)
            if o.kind is not OutcomeKind.SKIPPED:
                self._pushed_at[o.push.cluster] = ended
            yield PushPoint(
                r.round, r.version, str(o.kind), r.undone is not None, o.push.cluster, ended, seconds,
                run_tokens or 0, o.tokens, o.inner_steps, fold.loss if fold else None, o.norm, o.score,
                _rate_of(o.tokens, since, ended),
            )  # fmt: skip


def _rate_of(tokens: int, since: float | None, until: float) -> float | None:
    return tokens / (until - since) if since is not None and until > since else None


def mean_loss(folds: Iterable[FoldRow]) -> float | None:
    """The loss of a version: the mean of its pushes by tokens. One without a loss, or without tokens, counts not."""
    pairs: list[tuple[int, float | None]] = [(fold.tokens, fold.loss) for fold in folds]
    told = [(tokens, loss) for tokens, loss in pairs if loss is not None]
    total = sum(tokens for tokens, _ in told)
    return sum(tokens * loss for tokens, loss in told) / total if total else None


def list_points(rounds: Sequence[RoundHistory]) -> tuple[list[RoundPoint], list[ResultPoint]]:
    """The points of rounds from the run's first on, and of what was done for their versions."""
    maker = PointMaker()
    points, results = list[RoundPoint](), list[ResultPoint]()
    for r in rounds:
        if (point := maker.make_point(r)) is not None:
            points.append(point)
            results += maker.make_results(r)
    return points, results


def write_csv(path: Path, kind: type[PushPoint] | type[ResultPoint], points: Iterable[Any]) -> None:
    """Write points as CSV, a column for each field: floats with all their digits, None empty, booleans as 0 and 1."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [field.name for field in fields(kind)]
        writer.writerow(names)
        values = ([getattr(point, name) for name in names] for point in points)
        writer.writerows([int(value) if isinstance(value, bool) else value for value in row] for row in values)


# ---- for trackers ----------------------------------------------------------------------------------------------------


def name_numbers(point: RoundPoint) -> Mapping[str, float]:
    """A round as TensorBoard and W&B show it: numbers by name; what it cannot say is left out."""
    run = {
        "run/hours": point.seconds / 3600,
        "run/version": None if point.version is None else float(point.version.version),
        "run/tokens": None if point.version is None else point.run_tokens,
        "run/delta_norm": point.delta_norm,
        "run/clipped": None if point.version is None else float(point.clipped),
        "run/tokens_per_s": point.tokens_per_s,
        "loss/run": point.loss,
        f"round/{point.kind}": 1.0 if point.version is None else None,
    }
    pushes = {
        f"{what}/{p.cluster}": number
        for p in point.pushes
        if p.kind != OutcomeKind.SKIPPED
        for what, number in (
            *(("loss", p.loss), ("norm", p.norm), ("score", p.score), ("gated", p.kind == OutcomeKind.GATED)),
            *(("tokens", p.tokens), ("inner_steps", p.inner_steps), ("tokens_per_s", p.tokens_per_s)),
        )
    }
    return {name: float(number) for name, number in (run | pushes).items() if number is not None}


def name_results(r: RoundHistory) -> Mapping[str, float]:
    """Return the numbers of `master.on_version` for the round's version, if there are any."""
    return {} if r.result is None else {f"on_version/{name}": x for name, x in r.result.numbers.items()}
