"""What must always be true of numbers: θ, weights, norms and the penalty's statistics (invariant 8)."""

from __future__ import annotations

from math import isfinite

from dips.ids import GENESIS
from dips.protocol.options import Options
from dips.protocol.records import (
    LedgerState,
    OptionsTuned,
    OutcomeRow,
    PenaltyRow,
    Record,
    RolledBack,
    RoundEnded,
    VersionCommitted,
)
from dips.protocol.tunable import tune_options
from dips.sim.world import World
from tests.simulation.checks import Invariant
from tests.simulation.operators import QUARANTINED
from tests.simulation.reference import LineageReference, PenaltyReference, same_statistics


class FiniteInvariant(Invariant):
    """θ and m are finite, weights sum to 1, norms and statistics are the reference's, moved by committed rows only."""

    number = 8

    def __init__(self, world: World, models: LineageReference) -> None:
        super().__init__(world)
        self.models = models
        self.statistics = PenaltyReference(world.options.penalty)
        self.lineage = {GENESIS}

    def record_written(self, record: Record) -> None:
        if isinstance(record, OptionsTuned):
            self.statistics.o = tune_options(Options(penalty=self.statistics.o), record.changes).penalty
        if isinstance(record, VersionCommitted):
            self._weights(record)
            self._norms(record)
            self.statistics.accepted(record.folds, self.lineage)
            self.lineage.add(record.version)
        elif isinstance(record, RolledBack):
            self.lineage.difference_update(record.undone)  # statistics stay: clusters are as loud as they were
        if isinstance(record, VersionCommitted | RoundEnded):
            self._gated(record.outcomes, record.penalty)
            if isinstance(record, RoundEnded) and record.kind == "skipped":
                self.require(not record.penalty, f"round {record.round} was skipped and moves statistics")
            self._same(record.penalty, "a row")

    def master_restored(self, state: LedgerState) -> None:
        self._same(state.penalty, "the ledger")

    def _weights(self, record: VersionCommitted) -> None:
        total = sum(f.tokens for f in record.folds)
        for fold in record.folds:
            expected = fold.tokens / record.folds[0].tokens
            self.require(
                abs(fold.weight - expected) <= 1e-12 * expected, f"{fold.push} weighs {fold.weight}, not {expected}"
            )
        shares = sum(f.weight * record.folds[0].tokens / total for f in record.folds)
        self.require(abs(shares - 1.0) < 1e-9, f"the weights of {record.version} sum to {shares}")
        delta = max(record.delta_norm, 1e-30)
        clip = self.world.options.outer.clip.norm
        scale = record.folds[0].tokens / total * (1.0 if clip is None else min(1.0, clip / delta))
        self.require(
            abs(record.scale - scale) <= 1e-9 * scale, f"{record.version} was scaled by {record.scale}, not {scale}"
        )

    def _norms(self, record: VersionCommitted) -> None:
        for numbers in self.models.versions[record.version].theta.values():
            self.require(all(map(isfinite, numbers)), f"{record.version} is not finite")
        for fold in record.folds:
            norm = self.models.norm(record.parent, self.world.books.frozen[fold.push].content, fold.inner_steps)
            self.require(
                abs(norm - fold.norm) <= 1e-5 * norm, f"the norm of {fold.push} is {norm}, the row says {fold.norm}"
            )

    def _gated(self, outcomes: tuple[OutcomeRow, ...], updated: tuple[PenaltyRow, ...]) -> None:
        rows = {row.cluster: row for row in updated}
        for outcome in outcomes:
            if outcome.kind == "gated" and not outcome.reason.startswith(QUARANTINED):
                cluster = outcome.push.cluster
                self.require(cluster in rows, f"{outcome.push} was gated and the round has no statistics of {cluster}")
                self.statistics.gated(cluster, rows[cluster])

    def _same(self, rows: tuple[PenaltyRow, ...], whose: str) -> None:
        for row in rows:
            expected = self.statistics.row(row.cluster)
            self.require(same_statistics(row, expected), f"{whose} has {row}, the reference has {expected}")
