"""The gate `loss`: a push whose reported loss has risen, against the others' and its own past, is of bad data or a
broken trainer.

What is compared is the *rise* of a cluster's distance to the others over its usual one. That is learned from its first
LEARNED losses beside others', in which nobody is gated up to MOST_USUAL, and follows each accepted push from then on; a
gated one teaches nothing. So data that always was harder gates nobody: it is flagged (differences.py). A first rise is
flagged, further ones are gated: what is kept out is forgotten by θ and rises for that alone, so nobody may be kept out
for one unlucky push. Only above the others: while losses fall fast every push is below what they reported last, but
that ends. What clusters report is believed.

Limits: what was bad from the start is taken for harder, and what gets worse slowly is followed.
"""

from __future__ import annotations

from math import isfinite
from statistics import median

from dips.protocol.norm_scores import Past, is_joiner
from dips.protocol.records import PenaltyRow
from dips.protocol.verdicts import Finding, Opinion, PushEvidence

MARGIN = (
    0.15  # above what is usual for it: shuffled targets were at 0.25 at once, healthy ones of like data within 0.08
)
MOST_USUAL = 1.0  # of the others' median: twice their loss is no language that a model learns beside theirs
LEARNED = 10  # losses beside others' that make a distance usual, as pushes make a norm's
LEAST_OTHERS = 2  # that gate
LEAST_LOSS = 1e-9  # a median nearer to 0 has no shares
LARGEST_LOSS = 1e30  # what is above counts as that: shares of it stay finite


def judge_loss(push: PushEvidence, past: Past) -> Opinion:
    """Gated if it is MARGIN above what is usual for it beside the median of the others' last ones."""
    if push.loss is None:
        return Opinion(Finding.PASSED, "it reported no loss to compare")
    others = known_losses(past)
    excess = excess_loss(push.loss, others)
    if excess is None:
        return Opinion(Finding.PASSED, "no others' losses to compare its own with")
    left = LEARNED - past.row.losses
    said = f"loss {push.loss:.4g} is {100 * excess:+.0f} % of the others' median {median(others):.4g} above it"
    learned = f", usually {100 * past.row.loss_shift:+.0f} %"
    said += f"; what is usual is learned, {left} pushes left" if left > 0 else learned
    if excess <= _most_excess(past.row):
        return Opinion(Finding.PASSED, said)
    if len(others) < LEAST_OTHERS:
        return Opinion(Finding.FLAGGED, f"{said}; one other is too few to say who is right")
    if not past.row.loss_rises:
        return Opinion(Finding.FLAGGED, f"{said}; gated if its next one is, too")
    return Opinion(Finding.GATED, said)


def has_risen(loss: float, past: Past) -> bool:
    """Whether it is MARGIN above what is usual, by the row as it was before."""
    excess = excess_loss(loss, known_losses(past))
    return excess is not None and excess > _most_excess(past.row)


def _most_excess(row: PenaltyRow) -> float:
    """MARGIN above what is usual, which is anything up to MOST_USUAL while that is learned."""
    usual = row.loss_shift if row.losses >= LEARNED else MOST_USUAL
    return (1.0 + max(0.0, usual)) * (1.0 + MARGIN) - 1.0


def known_losses(past: Past) -> list[float]:
    """The last losses of the others that have warmed up: what the first ones report falls too fast to be compared."""
    return [row.loss for row in _others(past) if row.loss is not None and not is_joiner(row, past.options)]


def taught_losses(past: Past) -> list[float]:
    """The others' last losses that its usual distance is learned from: in the run's first warm-up, those of joiners."""
    known = known_losses(past)
    return known if len(known) >= LEAST_OTHERS else [row.loss for row in _others(past) if row.loss is not None]


def _others(past: Past) -> list[PenaltyRow]:
    return [row for row in past.rows.values() if row.cluster != past.row.cluster]


def excess_loss(loss: float, others: list[float]) -> float | None:
    """Share of the others' median by which a loss is above it; None if there is none, or it is 0."""
    if not others or abs(middle := median(map(bound_loss, others))) < LEAST_LOSS:
        return None
    return (bound_loss(loss) - middle) / abs(middle)


def bound_loss(loss: float) -> float:
    """A number that can be counted with."""
    return max(-LARGEST_LOSS, min(loss, LARGEST_LOSS)) if isfinite(loss) else LARGEST_LOSS
