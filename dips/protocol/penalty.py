"""The pseudo-gradient penalty (§4.1, docs/architecture.md#penalty, docs/rationale.md#10): which pushes count."""

from __future__ import annotations

from bisect import bisect_left
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import sqrt

from dips.dataclass import replace
from dips.protocol.enums import Difference, GateName
from dips.protocol.gates import OF_NORMS, find_gate
from dips.protocol.gates.direction import (
    LEARNED_COSINES,
    LEAST_USUAL,
    LEAST_WITNESSES,
    LIKE,
    is_against,
    is_suspect,
    lacks_witnesses,
    own_usual,
)
from dips.protocol.gates.losses import LEARNED, MARGIN, MOST_USUAL, bound_loss, excess_loss, has_risen, taught_losses
from dips.protocol.gates.norms import (
    OWN_REFERENCE,
    LastNorms,
    Past,
    corrected_sigma,
    gate_threshold,
    has_score,
    is_joiner,
    layer_norms,
    longest_step,
    median_without,
)
from dips.protocol.gates.replays import DIGESTS_KEPT
from dips.protocol.options import PenaltyOptions
from dips.protocol.records import LayerStatistics, PenaltyRow, ScoreHistory
from dips.protocol.rules import TOKENS_KEPT, most_tokens
from dips.protocol.verdicts import Finding, Opinion, PushEvidence, Settled, Verdict

# ---- differences ----------------------------------------------------------------------------------------------------


def find_differences(row: PenaltyRow, cosines: Sequence[float], options: PenaltyOptions) -> dict[Difference, str]:
    """Return the cluster's lasting differences with a sentence each, from statistics of the gates that are on.

    cosines  the usual ones of all clusters that have learned theirs, ascending
    """
    found = dict[Difference, str]()
    if GateName.LOSS in options.gates and row.losses >= LEARNED and row.loss_shift > MARGIN:
        found[Difference.LOSS] = (
            f"its loss is usually {100 * row.loss_shift:+.0f} % of the others' above theirs: harder data, or data that "
            "was bad from the start"
        )
    if GateName.DIRECTION not in options.gates or row.cosines < LEARNED_COSINES or len(cosines) <= LEAST_WITNESSES:
        return found
    usual = median_without(cosines, bisect_left(cosines, row.cosine))
    if usual >= LEAST_USUAL and row.cosine < LIKE * usual:
        found[Difference.DIRECTION] = (
            f"its pushes usually have a cosine of {row.cosine:.2f} with the others', theirs have {usual:.2f}: data of "
            "another kind, or pushes that were bad from the start"
        )
    return found


# ---- penalty rows ---------------------------------------------------------------------------------------------------
# Updates of a cluster's statistics by a settled push: pure functions from row to row.
#
# Gated pushes do not change what norms are compared with, so a push that was kept out cannot shift the gate.


MOST_TIMES_ENTERED = 2.0  # of the reference, to which one norm is cut: it doubles in 35 pushes at the earliest
LOSS_SHARE = 0.2  # of the newest push in a cluster's usual distance to the others' losses, which changes with θ
COSINE_SHARE = 0.2  # of the newest push in a cluster's usual cosine, which falls as the common part is learned
SUSPICION_KEPT = 0.5  # share of suspicion that is kept from one of a cluster's pushes to its next
KEPT_UNHEARD = 0.75  # the same share if the push was gated for want of witnesses, which tells little
ACCUSED_STILL = 0.5  # suspicion added by a push that is only unrelated to the others: a suspect remains one
MOST_SUSPICION = 16.0  # limit: suspicion falls below SUSPECT in six pushes, in thirteen if they cannot be compared


def fresh_row(cluster: str, options: PenaltyOptions) -> PenaltyRow:
    """Return the statistics of a cluster before its first measured push."""
    return PenaltyRow(cluster, 0, 0.0, 0.0, 0.0, options.warmup_rounds, 0, False, 0)


def slow_mean(mean: float, value: float, count: int, alpha: float, known: float = 0.0) -> float:
    """Update a mean of `count` values with one more, which counts as at most MOST_TIMES_ENTERED times the mean.

    So the mean grows by at most 1/(count + 1), later α, with each value, even if values are made up.

    known  a value of up to this counts whole: the others' values
    """
    if mean <= 0.0:
        return value
    return mean + max(alpha, 1.0 / (count + 1)) * (min(value, max(known, MOST_TIMES_ENTERED * mean)) - mean)


def move_accepted(verdict: Verdict, past: Past, limit: float) -> PenaltyRow:
    """Return the row of a cluster whose push is in the sum; `limit` is the threshold that it was judged by."""
    row = past.row
    if not verdict.tracked:
        return replace(row, gated_in_a_row=0, quarantined=False, accepted=row.accepted + 1)
    g, options, push = verdict.norm, past.options, verdict.evidence
    alpha, n = options.alpha, row.n + 1
    known = past.warm_norms.median_without(row) if is_joiner(row, options) else None
    x = g
    if has_score(row) and GateName.DIPS_PAPER not in options.gates:
        x = min(g, row.mu + limit * corrected_sigma(row, options))
    mu, sigma = _move_average(x, row.mu, row.sigma, n, alpha)
    return replace(
        row,
        n=n,
        mu=mu,
        sigma=sigma,
        last_norm=g,
        warm_left=max(0, row.warm_left - 1),
        gated_in_a_row=0,
        quarantined=False,
        broken=False,
        accepted=row.accepted + 1,
        reference=slow_mean(row.reference, g, row.accepted, alpha, known or 0.0),
        steps=slow_mean(row.steps, max(1, push.inner_steps), row.accepted, alpha),
        layers=_move_layers(verdict, past) if GateName.EDIT in options.gates else (),
    )


def _move_average(x: float, mu: float, sigma: float, n: int, alpha: float) -> tuple[float, float]:
    """Return the new (μ, σ) of §4.1: μ, the plain mean until 1/n < α, then σ with the new μ; n counts this value."""
    weight = max(alpha, 1.0 / n)
    mu = weight * x + (1.0 - weight) * mu
    return mu, sqrt((1.0 - alpha) * sigma**2 + alpha * (x - mu) ** 2)


def _move_layers(verdict: Verdict, past: Past) -> tuple[LayerStatistics, ...]:
    """Update each layer's statistics; a layer that is left out only counts that, and starts anew after `gate_patience`
    times.
    """
    norms = layer_norms(verdict.evidence)
    layers = past.row.layers if len(past.row.layers) == len(norms) else (LayerStatistics(),) * len(norms)
    each = enumerate(zip(norms, layers, strict=True))
    return tuple(move_layer(layer, norm, place in verdict.flagged, past.options) for place, (norm, layer) in each)


def move_layer(layer: LayerStatistics, norm: float, flagged: bool, options: PenaltyOptions) -> LayerStatistics:
    """Update one layer's statistics by a norm of `norm_per_step`; a norm of 0 does not enter them."""
    if not flagged:
        mu, sigma = _move_average(norm, layer.mu, layer.sigma, layer.n + 1, options.alpha)
        return LayerStatistics(layer.n + 1, mu, sigma) if norm > 0.0 else replace(layer, left_out_in_a_row=0)
    if layer.left_out_in_a_row + 1 >= options.gate_patience:
        return LayerStatistics()
    return replace(layer, left_out_in_a_row=layer.left_out_in_a_row + 1)


def move_loss(row: PenaltyRow, verdict: Verdict, past: Past) -> PenaltyRow:
    """Update the last reported loss; for an accepted push also the usual distance to the others' losses."""
    loss = verdict.evidence.loss
    if loss is None:
        return row
    row = replace(row, loss=bound_loss(loss))
    if verdict.accepted or verdict.gate is GateName.LOSS:  # other gates' make θ forget: that is no rise
        row = replace(row, loss_rises=has_risen(loss, past))
    excess = excess_loss(loss, taught_losses(past))
    if not verdict.accepted or excess is None:
        return row
    weight = max(LOSS_SHARE, 1.0 / (row.losses + 1))
    usual = row.loss_shift + weight * (max(-MOST_USUAL, min(excess, MOST_USUAL)) - row.loss_shift)
    return replace(row, loss_shift=usual, losses=row.losses + 1)


def move_cosine(row: PenaltyRow, verdict: Verdict) -> PenaltyRow:
    """Update the usual cosine, with accepted pushes that had enough witnesses and did not point away from the sum.

    Flagged pushes do not count; otherwise their cosine would become usual and pass as data of another kind.
    """
    push = verdict.evidence
    if not verdict.accepted or push.cosine is None or lacks_witnesses(push) or is_against(push):
        return row
    weight = max(COSINE_SHARE, 1.0 / (row.cosines + 1))
    return replace(row, cosine=row.cosine + weight * (push.cosine - row.cosine), cosines=row.cosines + 1)


def accuse(verdicts: Sequence[Settled]) -> dict[str, float]:
    """Return the suspicion that the round adds to each cluster: 1 for a push that points away from the sum, and 1/n for
    each of the n clusters in the sum against which a push was flagged. A gated push was wrong and adds nothing to
    others. A push of θ itself adds 1: its cluster does not train, and its later pushes are the movement of θ,
    backwards.
    """
    folded = [s.cluster for s in verdicts if s.verdict.accepted]
    found = dict.fromkeys((s.cluster for s in verdicts), 0.0)
    for settled in verdicts:
        push = settled.verdict.evidence
        if not is_against(push):
            found[settled.cluster] += _accuse_itself(settled.verdict)
            continue
        found[settled.cluster] += 1.0
        if settled.verdict.accepted:
            for cluster in folded[: push.others]:
                found[cluster] += 1.0 / push.others
    return found


def _accuse_itself(verdict: Verdict) -> float:
    """Return the suspicion that a push adds to its own cluster although it does not point away."""
    if verdict.is_unmoved:
        return 1.0
    return ACCUSED_STILL * (verdict.gate is GateName.DIRECTION and not _is_unheard(verdict))


def _is_unheard(verdict: Verdict) -> bool:
    """Whether the push was gated because too few witnesses could be compared with it."""
    return verdict.gate is GateName.DIRECTION and lacks_witnesses(verdict.evidence)


def move_suspicion(rows: Mapping[str, PenaltyRow], verdicts: Sequence[Settled]) -> dict[str, PenaltyRow]:
    """Return the rows of all clusters with a settled push; earlier suspicion decays by SUSPICION_KEPT."""
    moved = dict[str, PenaltyRow]()
    unheard = {s.cluster for s in verdicts if _is_unheard(s.verdict)}
    for cluster, accused in accuse(verdicts).items():
        if (row := rows.get(cluster)) is not None:
            kept = KEPT_UNHEARD if cluster in unheard else SUSPICION_KEPT
            suspicion = min(MOST_SUSPICION, kept * row.suspicion + accused)
            moved[cluster] = replace(row, suspicion=suspicion)
    return moved


def restart_warmup(row: PenaltyRow, reference: float, options: PenaltyOptions) -> PenaltyRow:
    """Return the statistics of a new warm-up; only the parts of the hard cap and what is no norm are kept."""
    anew = fresh_row(row.cluster, options)
    kept = replace(anew, last_norm=row.last_norm, accepted=row.accepted, reference=reference, steps=row.steps)
    kept = replace(kept, loss=row.loss, loss_shift=row.loss_shift, losses=row.losses, loss_rises=row.loss_rises)
    return replace(kept, suspicion=row.suspicion, cosine=row.cosine, cosines=row.cosines, tokens=row.tokens)


def believe_world(row: PenaltyRow, norm: float, options: PenaltyOptions) -> PenaltyRow:
    """Return the statistics of a run that began with far too short pushes (a learning rate near 0): `norm` becomes
    usual.
    """
    anew = restart_warmup(row, max(row.reference, norm), options)
    return replace(anew, last_norm=max(row.last_norm, norm), accepted=max(row.accepted, OWN_REFERENCE))


# ---- penalty --------------------------------------------------------------------------------------------------------
# The pseudo-gradient penalty (§4.1, docs/architecture.md#penalty, docs/rationale.md#10): which pushes may enter the
# outer step.
#
# The gates in `penalty.gates` (gates/) judge a push by its evidence and by statistics of its cluster and the others,
# which this class keeps. Statistics change only when a round is in the ledger (`keep_statistics`), an operator readmits
# a cluster, or a cluster's model has diverged, so a skipped round leaves no trace; `judge_push` changes nothing.


LARGEST_NORM = 1e30  # larger norms overflow when squared in fp32 kernels and count as not finite
NOT_FINITE = "not finite: NaN, Inf or overflow in its parameters"
BROKEN = "quarantined until `dips cluster readmit`: its pushes were not finite"
UNMOVED = (
    "norm 0 after {} inner step{}: the optimizer trains other tensors than this OuterLoop pushes; make it after "
    "fully_shard and .to(), and the optimizer of the same model"
)


class Penalty:
    """The statistics of all clusters, and the gates."""

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
        """Use changed options from the next judgement on; statistics stay."""
        self._options = options

    def penalty_row(self, cluster: str) -> PenaltyRow:
        return self._rows.get(cluster) or fresh_row(cluster, self._options)

    def find_differences(self) -> dict[str, dict[Difference, str]]:
        """Return the lasting differences of each cluster that has some from the others, with a sentence each.

        Of all at once: a run may have had 10,000 clusters, and each status asks for it.
        """
        cosines = sorted(row.cosine for row in self._rows.values() if row.cosines >= LEARNED_COSINES)
        found = {name: find_differences(row, cosines, self._options) for name, row in self._rows.items()}
        return {name: differences for name, differences in found.items() if differences}

    def gate_threshold(self) -> float:
        """Return the present threshold of the gate `dips`."""
        return gate_threshold(self.history, self._options)

    # ---- judging ----

    def judge_push(self, push: PushEvidence) -> Verdict:
        """Judge one push: it must be finite and have moved, then pass each gate in turn."""
        g, gates = push.norm, self._options.gates
        if not g < LARGEST_NORM:
            return Verdict(False, 0.0, 0.0, NOT_FINITE, replace(push, finite=False), tracked=False)
        if g == 0.0 and push.inner_steps > 0:
            reason = UNMOVED.format(push.inner_steps, "s" * (push.inner_steps > 1))
            return Verdict(False, 0.0, 0.0, reason, push, tracked=False)
        past = self._past_of(self.penalty_row(push.cluster))
        if gates and past.row.broken:
            return Verdict(False, g, 0.0, BROKEN, push, tracked=False)
        opinions = list[Opinion]()
        for gate in gates:
            opinion = find_gate(gate)(push, past)
            if opinion.finding is Finding.GATED:
                return Verdict(False, g, opinion.score, opinion.sentence, push, tracked=not push.exempt, gate=gate)
            opinions.append(opinion)
        return _accept(push, g, opinions)

    def waits_for_others(self, cluster: str, live: Sequence[str]) -> bool:
        """Whether a push of this cluster is measured after all others of its round, if slots allow (round.py).

        A push of a joiner waits only if some live cluster is no joiner.
        """
        row = self.penalty_row(cluster)
        if not self.gates_direction:
            return False
        if is_suspect(row):
            return True
        return self._is_joiner(row) and any(not self._is_joiner(self.penalty_row(c)) for c in live if c != cluster)

    @property
    def gates_direction(self) -> bool:
        return GateName.DIRECTION in self._options.gates

    def count_trusted(self, cluster: str, live: Sequence[str]) -> int:
        """Return how many other live clusters were not out of line lately."""
        return sum(c != cluster and not is_suspect(self.penalty_row(c)) for c in live)

    def most_tokens(self) -> int | None:
        """Return how many tokens of one push count at most, by the last pushes of all clusters; None: any number."""
        return most_tokens(row.tokens for row in self._rows.values())

    def own_cosine(self, cluster: str) -> float | None:
        """Return the usual cosine of the cluster's pushes with the others'; None while it is learned."""
        return own_usual(self.penalty_row(cluster))

    def suspicion_of(self, cluster: str) -> tuple[float, bool]:
        """Return the sort key of held pushes: the cluster that was least out of line is measured first."""
        row = self.penalty_row(cluster)
        return row.suspicion, self._is_joiner(row)

    def _is_joiner(self, row: PenaltyRow) -> bool:
        return is_joiner(row, self._options)

    def _past_of(self, row: PenaltyRow) -> Past:
        return Past(
            self._options, row, self._rows, self._norms, self._warm_norms, self.history, self._genesis_norm
        )  # fmt: skip

    # ---- what a round changes ----

    def compute_statistics(
        self, verdicts: Sequence[Settled], live: Sequence[str], theta_digest: int = 0
    ) -> tuple[dict[str, PenaltyRow], ScoreHistory]:
        """Return the statistics that a round changes, in the order of folding, and the score history after it.

        They are not kept before `keep_statistics`.

        theta_digest  of the version that the round made; 0: it made none, or it is unknown
        """
        changed = dict[str, PenaltyRow]()
        rows = ChainMap(changed, self._rows)
        limit = self.gate_threshold()
        for s in (s for s in verdicts if s.verdict.accepted):
            row = rows.get(s.cluster) or fresh_row(s.cluster, self._options)
            moved = move_accepted(s.verdict, self._past_of(row), limit)
            changed[s.cluster] = replace(moved, tokens=(*row.tokens, s.tokens)[-TOKENS_KEPT:])
        gated = [s for s in verdicts if not s.verdict.accepted and not s.verdict.held]
        for cluster in (s.cluster for s in gated):
            row = rows.get(cluster) or fresh_row(cluster, self._options)
            changed[cluster] = replace(row, gated_in_a_row=row.gated_in_a_row + 1)
        # Patience is judged for all on one state: a cluster that warms up must not change the decision on the next.
        picture = _Picture(rows, live)
        changed |= {s.cluster: self._apply_patience(picture, s) for s in gated}
        self._move_others(changed, verdicts)
        return changed, self._history_after(verdicts, theta_digest)

    def _move_others(self, changed: dict[str, PenaltyRow], verdicts: Sequence[Settled]) -> None:
        """Update the statistics other than norms, for the gates that are on."""
        if GateName.LOSS in self._options.gates:
            for s in verdicts:
                if s.cluster in changed:
                    past = self._past_of(self.penalty_row(s.cluster))
                    changed[s.cluster] = move_loss(changed[s.cluster], s.verdict, past)
        if self.gates_direction:
            for s in (s for s in verdicts if s.cluster in changed):
                changed[s.cluster] = move_cosine(changed[s.cluster], s.verdict)
            changed |= move_suspicion(changed, [s for s in verdicts if not s.verdict.held])

    def _history_after(self, verdicts: Sequence[Settled], theta_digest: int) -> ScoreHistory:
        accepted = [s.verdict for s in verdicts if s.verdict.accepted]
        if not accepted:
            return self.history
        largest = max((v.score for v in accepted if v.scored and v.tracked), default=0.0)
        scores = (*self.history.scores, largest)[-self._options.history :]
        digests = self.history.digests
        if GateName.REPLAY in self._options.gates:
            made = (theta_digest,) if theta_digest else ()
            digests = (*digests, *(v.evidence.digest for v in accepted), *made)[-DIGESTS_KEPT:]
        return replace(self.history, scores=scores, digests=digests)

    def keep_statistics(self, changed: Mapping[str, PenaltyRow], history: ScoreHistory) -> None:
        """Keep the changed statistics of a round that is in the ledger."""
        for cluster, row in changed.items():
            for norms in (self._norms, self._warm_norms):
                norms.replace_row(self._rows.get(cluster), row)
            self._rows[cluster] = row
        self.history = history

    # ---- patience ----

    def readmit_cluster(self, cluster: str) -> PenaltyRow:
        """Lift a quarantine: restart the cluster's warm-up; return its new statistics, which are kept."""
        before = self.penalty_row(cluster)
        reference = max(before.reference, self._norms.median_without(before) or 0.0)
        anew = restart_warmup(before, reference, self._options)
        row = replace(anew, loss_shift=0.0, losses=0, loss_rises=False, cosine=0.0, cosines=0, suspicion=0.0)
        self.keep_statistics({cluster: row}, self.history)
        return row

    def count_divergence(self, cluster: str) -> PenaltyRow:
        """Count a push that was not sent, being not finite, as gated; return the new statistics, which are kept."""
        row = self.penalty_row(cluster)
        in_a_row = row.gated_in_a_row + 1
        row = replace(row, gated_in_a_row=in_a_row)
        if in_a_row >= self._options.gate_patience:
            row = replace(row, quarantined=True, broken=True)
        self._rows[cluster] = row
        return row

    def _apply_patience(self, picture: _Picture, settled: Settled) -> PenaltyRow:
        """Decide after `gate_patience` gated pushes in a row: a new warm-up if most of the run has changed, else
        quarantine.

        A cluster whose push was not finite gets no new warm-up: an operator must look at it first. The hard cap holds
        in every warm-up. For a joiner, a norm of at most ‖θ₀‖ is believed if the others have changed as well; later the
        reference is kept.
        """
        row, verdict = picture.rows[settled.cluster], settled.verdict
        if row.gated_in_a_row < self._options.gate_patience or row.broken:
            return row
        if not verdict.evidence.finite:
            return replace(row, quarantined=True, broken=True)
        if verdict.is_unmoved or (verdict.gate is not None and verdict.gate not in OF_NORMS):
            return replace(row, quarantined=True)  # no warm-up makes a direction, a loss, a replay or a norm of 0 usual
        others = picture.norms.median_without(row)
        is_world = others is None or picture.most_are_gated or picture.is_alone(row.cluster)
        if is_world and verdict.norm > 0 and self._is_joiner(row):  # a push without tokens has no norm to believe
            most = longest_step(self._genesis_norm, verdict.evidence.inner_steps)
            return believe_world(row, min(verdict.norm, most), self._options)
        if others is None or is_world or verdict.norm < 2 * others:
            return restart_warmup(row, max(row.reference, others or 0.0), self._options)
        return replace(row, quarantined=True)


def _accept(push: PushEvidence, norm: float, opinions: Sequence[Opinion]) -> Verdict:
    """Return the verdict on a push that no gate keeps out, with the score of the first gate that has one."""
    score = next((o.score for o in opinions if o.scored), next((o.score for o in opinions if o.score), 0.0))
    return Verdict(
        True,
        norm,
        score,
        "; ".join(o.sentence for o in opinions) or "finite",
        push,
        tracked=not push.exempt,
        scored=any(o.scored for o in opinions),
        flagged=frozenset().union(*(o.flagged for o in opinions)),
        flags=tuple(o.sentence for o in opinions if o.finding is Finding.FLAGGED),
    )


class _Picture:
    """The statistics as the round leaves them, before any decision on patience; costly parts are computed on demand."""

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
        """Whether no other live cluster has statistics; norms of clusters that have left do not count."""
        return all(c == cluster or c not in self.rows for c in self._live)
