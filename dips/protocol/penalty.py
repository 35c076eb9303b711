"""The pseudo-gradient penalty (§4.1, docs/architecture.md#penalty, docs/rationale.md#10): which pushes may enter the
outer step.

A push's norm G = Σ over layers ‖θ − θ_j‖₂, divided by √(inner steps), is compared with its cluster's own past:
score E = (G − μ)/σ, gated when E > β·min(E_cap, max(1, max E)). Statistics move only when a version is committed
(`keep_statistics`), so a skipped round leaves no trace; asking (`judge_push`) changes nothing.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import exp, isfinite, log, sqrt

from dips.dataclass import dataclass, replace
from dips.protocol.enums import PenaltyRule, ScoreScale
from dips.protocol.last_norms import LastNorms
from dips.protocol.options import PenaltyOptions
from dips.protocol.records import PenaltyRow, ScoreHistory
from dips.protocol.spread import spread_factor

LEAST_NORM = 1e-30  # of which a logarithm is taken
LARGEST_NORM = 1e30  # beyond it squares overflow in fp32 kernels; not finite for any purpose
OWN_REFERENCE = 2  # accepted pushes that a cluster's hard cap is made of; before, it is the others' if there are any
MOST_TIMES_ENTERED = 2.0  # the reference: what counts of one norm, so that it doubles in 35 pushes at the earliest
MOST_TIMES_STEPS = 16.0  # the usual inner steps: what counts of a claim against the hard cap, a factor of 4 in G


@dataclass(frozen=True, slots=True)
class Verdict:
    """The penalty's decision on one push, and why. `tracked` is False if it must leave the statistics alone."""

    accepted: bool
    norm: float
    score: float
    reason: str
    tracked: bool = True
    inner_steps: int = 1  # as claimed
    finite: bool = True  # its parameters
    held: bool = False  # gated by an operator's word, which moves no statistics and tries nobody's patience


@dataclass(frozen=True, slots=True)
class Settled:
    """A verdict whose round has ended."""

    cluster: str
    verdict: Verdict


def fresh_row(cluster: str, options: PenaltyOptions) -> PenaltyRow:
    """Statistics of a cluster of which no push was measured."""
    return PenaltyRow(cluster, 0, 0.0, 0.0, 0.0, options.warmup_rounds, 0, False, 0)


def slow_mean(mean: float, value: float, count: int, alpha: float, known: float = 0.0) -> float:
    """Move a mean of `count` values by one more, which counts as at most MOST_TIMES_ENTERED times the mean.

    So it grows by at most 1/(count + 1), later α, with each value, whoever makes them up.

    known  what counts whole, besides: the others' values
    """
    if mean <= 0.0:
        return value
    return mean + max(alpha, 1.0 / (count + 1)) * (min(value, max(known, MOST_TIMES_ENTERED * mean)) - mean)


def _has_score(row: PenaltyRow) -> bool:
    """Whether its norms are compared with their mean: not in a warm-up, and one norm has no spread."""
    return row.warm_left == 0 and row.n >= 2


UNMOVED = (
    "norm 0 after {} inner step{}: the optimizer trains other tensors than this OuterLoop pushes; make it after "
    "fully_shard and .to(), and the optimizer of the same model"
)


def push_norm(layer_sq: Iterable[float], inner_steps: int) -> float:
    """G of a push: Σ over layers ‖θ − θ_j‖₂, over √(inner steps), since paces differ by design."""
    return sum(sqrt(sq) for sq in layer_sq) / sqrt(max(1, inner_steps))


class Penalty:
    """The statistics of all clusters, and the rule."""

    def __init__(
        self,
        options: PenaltyOptions,
        rows: Iterable[PenaltyRow] = (),
        history: ScoreHistory = ScoreHistory((), ()),
        genesis_norm: float = 0.0,
    ) -> None:
        self._options = options
        self._rows = {row.cluster: row for row in rows}
        self._norms = LastNorms(self._rows.values())
        self._warm_norms = LastNorms(self._rows.values(), warm_only=True)
        self.history = history
        self._genesis_norm = genesis_norm

    def change_options(self, options: PenaltyOptions) -> None:
        """What an operator tuned holds for the next judgement; statistics stay."""
        self._options = options

    def penalty_row(self, cluster: str) -> PenaltyRow:
        return self._rows.get(cluster) or fresh_row(cluster, self._options)

    def gate_threshold(self) -> float:
        """β·min(E_cap, max(1, max E)): a quiet history must not gate all, nor a loud one none."""
        o = self._options
        largest = max(self.history.scores, default=1.0)
        return o.beta * min(o.e_cap, max(1.0, largest))

    def judge_push(
        self, cluster: str, layer_sq: Sequence[float], finite: bool, inner_steps: int, exempt: bool = False
    ) -> Verdict:
        """Judge one push; `exempt` if its base is no ancestor of θ (finite check and cap only)."""
        g = push_norm(layer_sq, inner_steps) if finite and all(isfinite(sq) for sq in layer_sq) else float("inf")
        if not g < LARGEST_NORM:
            reason = "not finite: NaN, Inf or overflow in its parameters"
            return Verdict(False, 0.0, 0.0, reason, tracked=False, finite=False)
        if g == 0.0 and inner_steps > 0:
            return Verdict(False, 0.0, 0.0, UNMOVED.format(inner_steps, "s" * (inner_steps > 1)), tracked=False)
        if self._options.rule is PenaltyRule.NONE:
            return Verdict(True, g, 0.0, "finite", inner_steps=inner_steps)
        return replace(self._judge_norm(self.penalty_row(cluster), g, inner_steps, exempt), inner_steps=inner_steps)

    def _judge_norm(self, row: PenaltyRow, g: float, inner_steps: int, exempt: bool) -> Verdict:
        if row.broken:
            return Verdict(False, g, 0.0, "quarantined until `dips readmit`: its pushes were not finite", tracked=False)
        held, (cap, of) = g * self._overclaimed(row, inner_steps), self._hard_cap(row, inner_steps)
        if held > cap:
            return Verdict(False, g, 0.0, f"norm {held:.4g} above the hard cap {cap:.4g}, {of}", tracked=not exempt)
        if exempt:
            return Verdict(True, g, 0.0, "its base is no ancestor: exempt from the score", tracked=False)
        if not _has_score(row):
            return Verdict(True, g, 0.0, f"warm-up, {row.warm_left} pushes left")
        score, limit = (self._scaled(g) - row.mu) / self._corrected_sigma(row), self.gate_threshold()
        if score > limit:
            mean = exp(row.mu) if self._is_log else row.mu
            return Verdict(False, g, score, f"score {score:.3g} above {limit:.3g} (norm {g:.4g}, mean {mean:.4g})")
        return Verdict(True, g, score, f"score {score:.3g}, at most {limit:.3g}")

    def compute_statistics(
        self, verdicts: Sequence[Settled], live: Sequence[str]
    ) -> tuple[dict[str, PenaltyRow], ScoreHistory]:
        """Return the statistics that a round changes and the score history after it, in the order of folding.

        Nothing is kept yet.
        """
        changed = dict[str, PenaltyRow]()
        rows = ChainMap(changed, self._rows)
        scores: list[float] = []
        limit = self.gate_threshold()
        for cluster, verdict in ((s.cluster, s.verdict) for s in verdicts if s.verdict.accepted):
            row = rows.get(cluster) or fresh_row(cluster, self._options)
            if verdict.tracked and _has_score(row):
                scores.append(verdict.score)
            changed[cluster] = self._after_accepted(row, verdict, limit)
        gated = [s for s in verdicts if not s.verdict.accepted and not s.verdict.held]
        for cluster in (s.cluster for s in gated):
            row = rows.get(cluster) or fresh_row(cluster, self._options)
            changed[cluster] = replace(row, gated_in_a_row=row.gated_in_a_row + 1)
        # All patience is judged on one picture: who warms up first must not decide who else may.
        picture = _Picture(rows, live)
        changed |= {s.cluster: self._apply_patience(picture, s) for s in gated}
        kept = self.history.scores
        if any(s.verdict.accepted for s in verdicts):
            kept = (*kept, max(scores, default=0.0))[-self._options.history :]
        return changed, ScoreHistory(kept, self.history.delta_norms)

    def keep_statistics(self, changed: Mapping[str, PenaltyRow], history: ScoreHistory) -> None:
        """The round is in the ledger: what it changed is ours."""
        for cluster, row in changed.items():
            for norms in (self._norms, self._warm_norms):
                norms.replace_row(self._rows.get(cluster), row)
            self._rows[cluster] = row
        self.history = history

    def readmit_cluster(self, cluster: str) -> PenaltyRow:
        """Lift a quarantine: the cluster warms up again; return its statistics, which are ours from now on."""
        before = self.penalty_row(cluster)
        row = self._restart_warmup(before, max(before.reference, self._norms.median_without(before) or 0.0))
        self.keep_statistics({cluster: row}, self.history)
        return row

    def count_divergence(self, cluster: str) -> PenaltyRow:
        """A push that was not finite never came: count it as gated; return the statistics, ours from now on."""
        row = self.penalty_row(cluster)
        in_a_row = row.gated_in_a_row + 1
        row = replace(row, gated_in_a_row=in_a_row)
        if in_a_row >= self._options.gate_patience:
            row = replace(row, quarantined=True, broken=True)
        self._rows[cluster] = row
        return row

    def _corrected_sigma(self, row: PenaltyRow) -> float:
        corrected = row.sigma * spread_factor(row.n, self._options.alpha)
        return max(corrected, self._options.sigma_floor * (1.0 if self._is_log else row.mu), 1e-30)

    @property
    def _is_log(self) -> bool:
        return self._options.score is ScoreScale.LOG

    def _scaled(self, norm: float) -> float:
        """What the statistics are of. A norm is 0 only where no inner step was taken."""
        return log(max(norm, LEAST_NORM)) if self._is_log else norm

    def _hard_cap(self, row: PenaltyRow, inner_steps: int) -> tuple[float, str]:
        """(the norm above which even a warm-up is gated, what it is made of); no warm-up begins the reference anew."""
        factor = self._options.hard_cap
        if self._is_joiner(row) and (others := self._warm_norms.median_without(row)) is not None:
            return self._options.joiner_cap * others, f"{self._options.joiner_cap:g} × the others' median"
        if row.accepted >= OWN_REFERENCE and row.reference > 0:
            return factor * row.reference, f"{factor:g} × its usual norm"
        if (others := self._norms.median_without(row)) is not None:
            return factor * others, f"{factor:g} × the others' median"
        if row.reference > 0:
            return factor * row.reference, f"{factor:g} × its usual norm"
        return self._longest_step(inner_steps), "the initial model's own norm"

    def _longest_step(self, inner_steps: int) -> float:
        """No push moves θ by more than its own length."""
        return self._genesis_norm / sqrt(max(1, inner_steps)) if self._genesis_norm > 0 else float("inf")

    def _is_joiner(self, row: PenaltyRow) -> bool:
        """Whether it is in its first warm-up: what it has pushed so far says little of what it should."""
        return row.accepted < self._options.warmup_rounds and row.warm_left > 0

    @staticmethod
    def _overclaimed(row: PenaltyRow, inner_steps: int) -> float:
        """By what the hard cap raises G, because only MOST_TIMES_STEPS times the usual inner steps are believed."""
        if row.steps <= 0:
            return 1.0
        return sqrt(max(1.0, inner_steps / (MOST_TIMES_STEPS * row.steps)))

    def _after_accepted(self, row: PenaltyRow, verdict: Verdict, limit: float) -> PenaltyRow:
        if not verdict.tracked:
            return replace(row, gated_in_a_row=0, quarantined=False, accepted=row.accepted + 1)
        g, alpha, n = verdict.norm, self._options.alpha, row.n + 1
        known = self._warm_norms.median_without(row) if self._is_joiner(row) else None
        reference = slow_mean(row.reference, g, row.accepted, alpha, known or 0.0)
        steps = slow_mean(row.steps, max(1, verdict.inner_steps), row.accepted, alpha)
        x = self._scaled(g)
        if _has_score(row):
            x = min(x, row.mu + limit * self._corrected_sigma(row))
        weight = max(alpha, 1.0 / n)  # the plain mean until 1/n < α
        mu = weight * x + (1.0 - weight) * row.mu
        sigma = sqrt((1.0 - alpha) * row.sigma**2 + alpha * (x - mu) ** 2)
        warm_left, accepted = max(0, row.warm_left - 1), row.accepted + 1
        return PenaltyRow(row.cluster, n, mu, sigma, verdict.norm, warm_left, 0, False, accepted, reference, steps)

    def _apply_patience(self, picture: _Picture, settled: Settled) -> PenaltyRow:
        """Gated `gate_patience` times in a row: warm up again if the world has changed, else quarantine.

        Who pushes what is not finite never earns a warm-up: an operator looks at it first. The hard cap holds in every
        warm-up.
        """
        row, verdict = picture.rows[settled.cluster], settled.verdict
        if row.gated_in_a_row < self._options.gate_patience or row.broken:
            return row
        if not verdict.finite:
            return replace(row, quarantined=True, broken=True)
        others = picture.norms.median_without(row)
        is_world = others is None or picture.most_are_gated or picture.is_alone(row.cluster)
        if is_world and self._is_joiner(row):
            return self._believe_world(row, verdict)
        if others is None or is_world or verdict.norm < 2 * others:
            return self._restart_warmup(row, max(row.reference, others or 0.0))
        return replace(row, quarantined=True)

    def _believe_world(self, row: PenaltyRow, verdict: Verdict) -> PenaltyRow:
        """A run began with pushes that were far too short, of a learning rate near 0: the last gated one is usual.

        Only while it is young, and within θ₀: a run whose reference has been formed keeps it (docs/rationale.md#10).
        """
        norm = min(verdict.norm, self._longest_step(verdict.inner_steps))
        fresh = self._restart_warmup(row, max(row.reference, norm))
        return replace(fresh, last_norm=max(row.last_norm, norm), accepted=max(row.accepted, OWN_REFERENCE))

    def _restart_warmup(self, row: PenaltyRow, reference: float) -> PenaltyRow:
        """Statistics of a new warm-up; of the past only what the hard cap is made of stays."""
        fresh = fresh_row(row.cluster, self._options)
        return replace(fresh, last_norm=row.last_norm, accepted=row.accepted, reference=reference, steps=row.steps)


class _Picture:
    """The statistics as one round leaves them, before anybody's patience; what is costly only if somebody asks."""

    def __init__(self, rows: Mapping[str, PenaltyRow], live: Sequence[str]) -> None:
        self.rows, self._live = rows, live

    @cached_property
    def norms(self) -> LastNorms:
        return LastNorms(self.rows.values())

    @cached_property
    def most_are_gated(self) -> bool:
        live = self._live
        gating = [c for c in live if c in self.rows and self.rows[c].gated_in_a_row > 0]
        return len(live) > 1 and 2 * len(gating) > len(live)

    def is_alone(self, cluster: str) -> bool:
        """Whether no other cluster lives whose pushes were ever measured: norms of those that left are of the past."""
        return all(c == cluster or c not in self.rows for c in self._live)
