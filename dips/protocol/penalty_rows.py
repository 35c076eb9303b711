"""How a settled push moves its cluster's statistics: pure functions from row to row.

Gated pushes move none of what norms are compared with, so nothing that was kept out can teach the gate.
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

MOST_TIMES_ENTERED = 2.0  # the reference: what counts of one norm, so that it doubles in 35 pushes at the earliest
LOSS_SHARE = 0.2  # of the newest push in a cluster's usual distance to the others' losses, which moves as θ is trained
COSINE_SHARE = 0.2  # likewise in its usual cosine with their sum, which falls as what all have in common is learned
SUSPICION_KEPT = 0.5  # from one of a cluster's pushes to its next
KEPT_UNHEARD = 0.75  # likewise, if it was gated for want of witnesses, which tells little
ACCUSED_STILL = 0.5  # by a push that is only foreign to the others: a suspect that goes on so remains one
MOST_SUSPICION = 16.0  # what is accused for ever is forgiven in six pushes, in thirteen that cannot be compared


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


def move_accepted(verdict: Verdict, past: Past, limit: float) -> PenaltyRow:
    """The row of a cluster whose push is in the sum; `limit` is the threshold that it was judged by."""
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
    """§4.1: μ, the plain mean until 1/n < α, then σ with the new μ; n counts this value."""
    weight = max(alpha, 1.0 / n)
    mu = weight * x + (1.0 - weight) * mu
    return mu, sqrt((1.0 - alpha) * sigma**2 + alpha * (x - mu) ** 2)


def _move_layers(verdict: Verdict, past: Past) -> tuple[LayerStatistics, ...]:
    """A layer that is left out moves nothing but its count; `gate_patience` times in a row, and it begins anew."""
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
    """What it reported last, whatever came of it; if it was accepted, how far from the others' is usual, too."""
    loss = verdict.evidence.loss
    if loss is None:
        return row
    row = replace(row, loss=bound_loss(loss))
    if verdict.accepted or verdict.gate is GateName.LOSS:  # whom another gate keeps out, θ forgets: that is no rise
        row = replace(row, loss_rises=has_risen(loss, past))
    excess = excess_loss(loss, taught_losses(past))
    if not verdict.accepted or excess is None:
        return row
    weight = max(LOSS_SHARE, 1.0 / (row.losses + 1))
    usual = row.loss_shift + weight * (max(-MOST_USUAL, min(excess, MOST_USUAL)) - row.loss_shift)
    return replace(row, loss_shift=usual, losses=row.losses + 1)


def move_cosine(row: PenaltyRow, verdict: Verdict) -> PenaltyRow:
    """Its usual cosine with the sum of others: by what was accepted beside enough witnesses and did not point away.

    Else who is flagged would make usual what it is flagged for: it would be told as data of another kind, and pass.
    """
    push = verdict.evidence
    if not verdict.accepted or push.cosine is None or lacks_witnesses(push) or is_against(push):
        return row
    weight = max(COSINE_SHARE, 1.0 / (row.cosines + 1))
    return replace(row, cosine=row.cosine + weight * (push.cosine - row.cosine), cosines=row.cosines + 1)


def accuse(verdicts: Sequence[Settled]) -> dict[str, float]:
    """By whom in the round is a cluster's direction spoken against: 1 for its own push, and a share of 1 for each in
    the sum that a push was flagged by; one that was gated was wrong, and so accuses nobody. Whose push is θ itself does
    not train: what it pushes in a later round is how θ moved, backwards.
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
    """By a push that does not point away."""
    if verdict.is_unmoved:
        return 1.0
    return ACCUSED_STILL * (verdict.gate is GateName.DIRECTION and not _is_unheard(verdict))


def _is_unheard(verdict: Verdict) -> bool:
    """Gated because too few could speak for it."""
    return verdict.gate is GateName.DIRECTION and lacks_witnesses(verdict.evidence)


def move_suspicion(rows: Mapping[str, PenaltyRow], verdicts: Sequence[Settled]) -> dict[str, PenaltyRow]:
    """The rows of all whose pushes were settled, half of what they were suspected of before forgotten."""
    moved = dict[str, PenaltyRow]()
    unheard = {s.cluster for s in verdicts if _is_unheard(s.verdict)}
    for cluster, accused in accuse(verdicts).items():
        if (row := rows.get(cluster)) is not None:
            kept = KEPT_UNHEARD if cluster in unheard else SUSPICION_KEPT
            suspicion = min(MOST_SUSPICION, kept * row.suspicion + accused)
            moved[cluster] = replace(row, suspicion=suspicion)
    return moved


def restart_warmup(row: PenaltyRow, reference: float, options: PenaltyOptions) -> PenaltyRow:
    """Statistics of a new warm-up; of the past only what the hard cap is made of stays, and what is no norm."""
    anew = fresh_row(row.cluster, options)
    kept = replace(anew, last_norm=row.last_norm, accepted=row.accepted, reference=reference, steps=row.steps)
    kept = replace(kept, loss=row.loss, loss_shift=row.loss_shift, losses=row.losses, loss_rises=row.loss_rises)
    return replace(kept, suspicion=row.suspicion, cosine=row.cosine, cosines=row.cosines, tokens=row.tokens)


def believe_world(row: PenaltyRow, norm: float, options: PenaltyOptions) -> PenaltyRow:
    """A run began with pushes that were far too short, of a learning rate near 0: `norm`, gated last, is usual."""
    anew = restart_warmup(row, max(row.reference, norm), options)
    return replace(anew, last_norm=max(row.last_norm, norm), accepted=max(row.accepted, OWN_REFERENCE))
