"""What a tracker shows of a run (`master.track`): each round of the ledger as numbers by name. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dips.ids import GENESIS, VersionId
from dips.master.last_loss import mean_loss
from dips.master.ledger_history import RoundHistory

VERSIONS_KEPT = 10_000  # newest, whose tokens are known: no rollback goes farther


@dataclass(frozen=True, slots=True)
class TrackPoint:
    """Numbers of one round, which is the step that trackers draw them at."""

    round: int
    wall: float  # Unix seconds
    numbers: Mapping[str, float]


class RunTotals:
    """What is counted over the rounds, in their order, from the first on."""

    def __init__(self) -> None:
        self.began: float | None = None  # Unix seconds
        self._tokens = {GENESIS: 0}  # accepted by each version's lineage: one that was rolled back counts no further

    def count_version(self, version: VersionId, parent: VersionId, tokens: int) -> int | None:
        """Return the tokens of the version's lineage; None if its parent is too long ago."""
        before = self._tokens.get(parent)
        if before is None:
            return None
        self._tokens[version] = before + tokens
        if len(self._tokens) > VERSIONS_KEPT:
            del self._tokens[next(iter(self._tokens))]
        return before + tokens


def point_of_round(r: RoundHistory, totals: RunTotals) -> TrackPoint | None:
    """The numbers of a round that has ended, which `totals` then counts; None of one whose master died in it."""
    totals.began = r.opened if totals.began is None else totals.began
    if r.ended is None:
        return None
    numbers = dict(_run_numbers(r, totals, r.ended)) | dict(_push_numbers(r))
    return TrackPoint(r.round, r.ended, numbers)


def point_of_result(r: RoundHistory) -> TrackPoint | None:
    """What `master.on_version` said of the round's version; None if it said no number."""
    if r.result is None or not r.result.numbers:
        return None
    return TrackPoint(r.round, r.result.wall, {f"on_version/{name}": x for name, x in r.result.numbers.items()})


def _run_numbers(r: RoundHistory, totals: RunTotals, ended: float) -> Iterator[tuple[str, float]]:
    """Of the whole run; what a round that made no version cannot say is left out."""
    yield "run/hours", (ended - (totals.began or ended)) / 3600
    if r.version is None:
        yield f"round/{r.kind}", 1.0
        return
    tokens = totals.count_version(r.version, r.parent or GENESIS, r.tokens)
    yield "run/version", float(r.version.version)
    if tokens is not None:
        yield "run/tokens", float(tokens)
    yield "run/delta_norm", r.delta_norm
    yield "run/clipped", float(r.clipped)
    if (loss := mean_loss(r.folds)) is not None:
        yield "loss/run", loss


def _push_numbers(r: RoundHistory) -> Iterator[tuple[str, float]]:
    """Of each cluster: what its push lost, weighed, and whether the gate let it in."""
    for fold in r.folds:
        if fold.loss is not None:
            yield f"loss/{fold.push.cluster}", fold.loss
    for outcome in r.outcomes:
        name = outcome.push.cluster
        if outcome.kind == "skipped":
            continue
        yield f"norm/{name}", outcome.norm
        yield f"score/{name}", outcome.score
        yield f"gated/{name}", float(outcome.kind == "gated")
        yield f"tokens/{name}", float(outcome.tokens)
