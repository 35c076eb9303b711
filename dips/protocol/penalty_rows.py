"""Updates of a cluster's statistics by a settled push: pure functions from row to row.

Gated pushes do not change what norms are compared with, so a push that was kept out cannot shift the gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt

from dips.dataclass import replace
from dips.protocol.enums import GateName
from dips.protocol.gates.direction import is_against, lacks_witnesses
from dips.protocol.gates.layers import layer_norms
from dips.protocol.gates.losses import MOST_USUAL, bound_loss, excess_loss, has_risen, taught_losses
from dips.protocol.norm_scores import OWN_REFERENCE, Past, corrected_sigma, has_score, is_joiner
from dips.protocol.options import PenaltyOptions
from dips.protocol.records import LayerStatistics, PenaltyRow
from dips.protocol.verdicts import Settled, Verdict

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
    flagged, patience = verdict.flagged, past.options.gate_patience
    moved = []
    for place, (norm, layer) in enumerate(zip(norms, layers, strict=True)):
        if place not in flagged:
            mu, sigma = _move_average(norm, layer.mu, layer.sigma, layer.n + 1, past.options.alpha)
            moved.append(LayerStatistics(layer.n + 1, mu, sigma) if norm > 0.0 else replace(layer, left_out_in_a_row=0))
        elif layer.left_out_in_a_row + 1 >= patience:
            moved.append(LayerStatistics())
        else:
            moved.append(replace(layer, left_out_in_a_row=layer.left_out_in_a_row + 1))
    return tuple(moved)


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
