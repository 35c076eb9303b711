"""What must always be true of numbers: θ, weights, norms and the penalty's statistics (invariant 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt

from dips.ids import GENESIS, VersionId
from dips.protocol.enums import GateName
from dips.protocol.options import Options
from dips.protocol.records import (
    ClusterDiverged,
    ClusterReadmitted,
    FoldRow,
    LedgerState,
    OptionsTuned,
    OutcomeRow,
    PenaltyRow,
    Record,
    RolledBack,
    RoundEnded,
    VersionCommitted,
    VersionsRetired,
)
from dips.protocol.tunable import tune_options
from dips.sim.world import World
from tests import rules_reference
from tests.simulation.checks import Invariant
from tests.simulation.operators import QUARANTINED
from tests.simulation.reference import LineageReference, PenaltyReference, same_statistics, unpack, weight_in


class FiniteInvariant(Invariant):
    """θ and m are finite, weights sum to 1, norms and statistics are the reference's, moved by committed rows only."""

    number = 8

    def __init__(self, world: World, models: LineageReference) -> None:
        super().__init__(world)
        self.models = models
        theta = models.versions[GENESIS].theta.values()
        self.statistics = PenaltyReference(world.options.penalty, sum(map(rules_reference.norm_of, theta)))
        self.lineage = {GENESIS: None}  # as the ledger has it, oldest first
        self.retired: set[VersionId] = set()

    def record_written(self, record: Record) -> None:
        if isinstance(record, OptionsTuned):
            self.statistics.o = tune_options(Options(penalty=self.statistics.o), record.changes).penalty
        if isinstance(record, ClusterDiverged):
            self.statistics.diverged(record.penalty.cluster)
            self._same((record.penalty,), "a row")
        if isinstance(record, ClusterReadmitted):
            self.statistics.readmitted(record.penalty.cluster)
            self._same((record.penalty,), "a row")
        if isinstance(record, VersionCommitted):
            self._merged(record)
            self._norms(record)
            self.statistics.accepted(record.folds, self._remembered(record))
            self.lineage[record.version] = None
        elif isinstance(record, RolledBack):
            for version in record.undone:  # statistics stay: clusters are as loud as they were
                del self.lineage[version]
        elif isinstance(record, VersionsRetired):
            self.retired.update(record.versions)
        if isinstance(record, VersionCommitted | RoundEnded):
            self._gated(record.outcomes, record.penalty)
            if isinstance(record, RoundEnded) and record.kind == "skipped":
                self.require(not record.penalty, f"round {record.round} was skipped and moves statistics")
            self._same(record.penalty, "a row")

    def _remembered(self, record: VersionCommitted) -> set[VersionId]:
        """The lineage that the master had in mind: of old versions that nobody offers it may have forgotten any.

        Which of them it still knew its row says: a push from one that is forgotten moves no statistics.
        """
        if self.world.options.lineage_kept >= len(self.lineage) + len(self.retired):
            return set(self.lineage)
        old = self.lineage.keys() & self.retired
        rows = {row.cluster: row for row in record.penalty}
        unmoved = {f.base for f in record.folds if rows[f.push.cluster].n == self.statistics.row(f.push.cluster).n}
        return self.lineage.keys() - (old & unmoved)

    def master_restored(self, state: LedgerState) -> None:
        self._same(state.penalty, "the ledger")

    def _merged(self, record: VersionCommitted) -> None:
        """What a row's weights and scales make of its pushes is what the rule makes of them, all known at once."""
        for fold in record.folds:
            expected = fold.tokens / record.folds[0].tokens
            self.require(
                abs(fold.weight - expected) <= 1e-12 * expected, f"{fold.push} weighs {fold.weight}, not {expected}"
            )
        o, theta = self.world.options.outer, self.models.versions[record.parent].theta
        pushes = [self._pushed(record, fold, theta) for fold in record.folds]
        merged = [rules_reference.merge_layer(o, pushes, layer) for layer in sorted(theta)]
        norm = sqrt(sum(rules_reference.norm_of(g or []) ** 2 for g in merged))
        self.require(
            abs(record.delta_norm - norm) <= 1e-4 * norm, f"{record.version}: ‖δ‖ {record.delta_norm}, not {norm}"
        )
        for layer, expected in enumerate(rules_reference.clip_all(o.clip, merged)):
            made = self._made(record, pushes, layer)
            off = rules_reference.norm_of([x - y for x, y in zip(made, expected or [0.0] * len(made), strict=True)])
            self.require(off <= 1e-4 * norm, f"{record.version}, layer {layer}: {made}, the rule says {expected}")

    def _pushed(
        self, record: VersionCommitted, fold: FoldRow, theta: Mapping[int, Sequence[float]]
    ) -> rules_reference.Pushed:
        content = self.world.books.frozen[fold.push].content
        layers = [[t - p for t, p in zip(theta[i], unpack(content[i]), strict=True)] for i in sorted(theta)]
        flagged = {i for i in range(len(layers)) if weight_in(fold, i) == 0} if self._flags_layers else ()
        return rules_reference.Pushed(fold.tokens, fold.inner_steps, layers, frozenset(flagged))

    @property
    def _flags_layers(self) -> bool:
        return GateName.EDIT in self.world.options.penalty.gates

    @staticmethod
    def _made(record: VersionCommitted, pushes: Sequence[rules_reference.Pushed], layer: int) -> list[float]:
        scales, weights = record.step.scales, [weight_in(fold, layer) for fold in record.folds]
        summed = rules_reference.combine([p.layers[layer] for p in pushes], weights)
        return [scales[layer if len(scales) > 1 else 0] * x for x in summed]

    def _norms(self, record: VersionCommitted) -> None:
        for numbers in self.models.versions[record.version].theta.values():
            self.require(all(map(isfinite, numbers)), f"{record.version} is not finite")
        for fold in record.folds:
            norm = self.models.norm(record.parent, self.world.books.frozen[fold.push].content, fold.inner_steps)
            self.require(
                abs(norm - fold.norm) <= 1e-5 * norm, f"the norm of {fold.push} is {norm}, the row says {fold.norm}"
            )

    def _gated(self, outcomes: tuple[OutcomeRow, ...], updated: tuple[PenaltyRow, ...]) -> None:
        rows, before = {row.cluster: row for row in updated}, dict(self.statistics.rows)
        for outcome in outcomes:
            if outcome.kind == "gated" and not outcome.reason.startswith(QUARANTINED):
                cluster = outcome.push.cluster
                self.require(cluster in rows, f"{outcome.push} was gated and the round has no statistics of {cluster}")
                self.statistics.gated(cluster, rows[cluster], outcome.norm, outcome.inner_steps, before)

    def _same(self, rows: tuple[PenaltyRow, ...], whose: str) -> None:
        for row in rows:
            expected = self.statistics.row(row.cluster)
            self.require(same_statistics(row, expected), f"{whose} has {row}, the reference has {expected}")
