"""The numbers of a run for trackers (`master.track`): each round of the ledger as numbers by name. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dips.ids import GENESIS, VersionId
from dips.master.last_loss import mean_loss
from dips.master.ledger_history import RoundHistory

VERSIONS_KEPT = 10_000  # newest versions whose tokens are known: no rollback goes farther


@dataclass(frozen=True, slots=True)
class TrackPoint:
    """The numbers of one round, which is the step on the trackers' axes."""

    round: int
    wall: float  # Unix seconds
    numbers: Mapping[str, float]


class RunTotals:
    """Sums over the rounds, in their order, from the first on."""

    def __init__(self) -> None:
        self.began: float | None = None  # Unix seconds
        self._tokens = {GENESIS: 0}  # accepted in each version's lineage, without those that were rolled back

    def count_version(self, version: VersionId, parent: VersionId, tokens: int) -> int | None:
        """Return the tokens of the version's lineage; None if its parent is too old."""
        before = self._tokens.get(parent)
        if before is None:
            return None
        self._tokens[version] = before + tokens
        if len(self._tokens) > VERSIONS_KEPT:
            del self._tokens[next(iter(self._tokens))]
        return before + tokens


def point_of_round(r: RoundHistory, totals: RunTotals) -> TrackPoint | None:
    """Return the numbers of a round that has ended, and add it to `totals`; None for one that ended with its master."""
    totals.began = r.opened if totals.began is None else totals.began
    if r.ended is None:
        return None
    numbers = dict(_run_numbers(r, totals, r.ended)) | dict(_push_numbers(r))
    return TrackPoint(r.round, r.ended, numbers)


def point_of_result(r: RoundHistory) -> TrackPoint | None:
    """Return the numbers of `master.on_version` for the round's version; None if there are none."""
    if r.result is None or not r.result.numbers:
        return None
    return TrackPoint(r.round, r.result.wall, {f"on_version/{name}": x for name, x in r.result.numbers.items()})


def _run_numbers(r: RoundHistory, totals: RunTotals, ended: float) -> Iterator[tuple[str, float]]:
    """Iterate over numbers of the whole run; those that a round without a version does not have are left out."""
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
    """Iterate over each cluster's numbers: loss, norm, score, tokens, and whether its push was gated."""
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
