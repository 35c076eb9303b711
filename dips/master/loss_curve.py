"""The run's losses from the ledger's history: a point for each push and one for each number of `master.on_version`.
`dips plot` writes and draws them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dips.dataclass import dataclass
from dips.ids import GENESIS, PushId, VersionId
from dips.master.ledger_history import RoundHistory
from dips.protocol.records import FoldRow, OutcomeRow


@dataclass(frozen=True, slots=True)
class PushPoint:
    """One push with the outcome of its round. A number that the ledger does not have is None, and empty in the CSV."""

    round: int
    version: VersionId | None  # the version that the round made
    kind: str  # accepted | gated | skipped
    undone: bool  # its version was rolled back
    cluster: str
    wall: float  # Unix seconds of the round's end
    seconds: float  # since the first round opened
    run_tokens: int  # accepted in the lineage up to here
    tokens: int  # of this push
    inner_steps: int
    loss: float | None  # mean over its inner steps; of accepted pushes
    norm: float
    score: float


@dataclass(frozen=True, slots=True)
class ResultPoint:
    """One number from the process of a version; if it gave none, the name is empty and `reason` says why."""

    round: int
    version: VersionId
    undone: bool
    wall: float  # of the version
    seconds: float
    run_tokens: int
    name: str
    value: float | None
    reason: str


def list_pushes(rounds: Sequence[RoundHistory]) -> list[PushPoint]:
    """Return a point for each push of the rounds that ended, in the order of rounds; `rounds` must begin with the
    first.
    """
    tokens, points = count_tokens(rounds), []
    zero = rounds[0].opened if rounds else 0.0
    head = 0
    for r in rounds:
        if r.ended is None:
            continue
        head = tokens[r.version] if r.version is not None else head
        folds = {fold.push: fold for fold in r.folds}
        points += [_push_point(r, r.ended, zero, head, outcome, folds) for outcome in r.outcomes]
    return points


def list_results(rounds: Sequence[RoundHistory]) -> list[ResultPoint]:
    """Return a point for each number from a version's process, and one for each process that failed."""
    tokens, points = count_tokens(rounds), []
    zero = rounds[0].opened if rounds else 0.0
    for r in rounds:
        if r.result is None or r.version is None or r.ended is None:
            continue
        named = r.result.numbers.items() if r.result.ok else [("", None)]
        at = (r.round, r.version, r.undone is not None, r.ended, r.ended - zero, tokens[r.version])
        points += [ResultPoint(*at, name, value, r.result.reason) for name, value in named]
    return points


def count_tokens(rounds: Iterable[RoundHistory]) -> Mapping[VersionId, int]:
    """Return the tokens that each version's lineage has accepted; versions must follow their parents."""
    tokens = {GENESIS: 0}
    for r in rounds:
        if r.version is not None:
            tokens[r.version] = (tokens[r.parent] if r.parent else 0) + r.tokens
    return tokens


def mean_losses(points: Iterable[PushPoint]) -> list[tuple[PushPoint, float]]:
    """Return the run's loss at each version: the mean of its accepted pushes by tokens, with the last of these."""
    sums: dict[VersionId, tuple[PushPoint, float, int]] = {}
    for p in points:
        if p.version is not None and p.kind == "accepted" and p.loss is not None:
            _, total, weight = sums.get(p.version, (p, 0.0, 0))
            sums[p.version] = (p, total + p.loss * p.tokens, weight + p.tokens)
    return [(p, total / weight) for p, total, weight in sums.values() if weight]


def write_csv(path: Path, kind: type[PushPoint] | type[ResultPoint], points: Iterable[Any]) -> None:
    """Write points as CSV, a column for each field: floats with all their digits, None empty, booleans as 0 and 1."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [field.name for field in fields(kind)]
        writer.writerow(names)
        writer.writerows([_spell_value(getattr(point, name)) for name in names] for point in points)


def _spell_value(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _push_point(
    r: RoundHistory, ended: float, zero: float, head: int, o: OutcomeRow, folds: Mapping[PushId, FoldRow]
) -> PushPoint:
    fold = folds.get(o.push)
    return PushPoint(
        r.round, r.version, str(o.kind), r.undone is not None, o.push.cluster, ended, ended - zero, head,
        o.tokens, o.inner_steps, fold.loss if fold else None, o.norm, o.score,
    )  # fmt: skip
