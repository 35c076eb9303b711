"""The gate `loss`: gates a push whose reported loss has risen against the others' and its own past (bad data, a broken
trainer).

The gate compares the *rise* of a cluster's distance to the others over its usual distance. That is learned from its
first LEARNED losses that can be compared, during which no push is gated up to MOST_USUAL, and then follows each
accepted push; gated pushes do not change it. So data that always was harder is not gated: it is flagged
(differences.py). A first rise is flagged, further ones are gated: θ forgets what is kept out, so its loss rises for
that reason alone, and one unlucky push must not keep a cluster out. Only a loss above the others' counts: while losses
fall fast, every push is below the last reports of the others, but that ends. Reported losses are believed.

Limits: data that was bad from the start is taken for harder data, and a slow rise is followed.
"""

from __future__ import annotations

from math import isfinite
from statistics import median

from dips.protocol.gates.norms import Past, is_joiner
from dips.protocol.records import PenaltyRow
from dips.protocol.verdicts import Finding, Opinion, PushEvidence

MARGIN = 0.15  # above the usual distance: shuffled targets were at 0.25 at once, healthy ones of like data within 0.08
MOST_USUAL = 1.0  # of the others' median: no language that is learned beside theirs has twice their loss
LEARNED = 10  # comparable losses that make a distance usual, as pushes make a norm's
LEAST_OTHERS = 2  # clusters with known losses that are needed to gate
LEAST_LOSS = 1e-9  # no shares are taken of a median nearer to 0
LARGEST_LOSS = 1e30  # larger losses count as this one, so that shares of it stay finite


def judge_loss(push: PushEvidence, past: Past) -> Opinion:
    """Gate a push whose loss is MARGIN above its cluster's usual distance to the median of the others' last losses."""
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
    """Whether a loss is MARGIN above the usual distance, by the row before this push."""
    excess = excess_loss(loss, known_losses(past))
    return excess is not None and excess > _most_excess(past.row)


def _most_excess(row: PenaltyRow) -> float:
    """Return the largest distance that is not a rise: MARGIN above the usual one, which is MOST_USUAL while it is
    learned.
    """
    usual = row.loss_shift if row.losses >= LEARNED else MOST_USUAL
    return (1.0 + max(0.0, usual)) * (1.0 + MARGIN) - 1.0


def known_losses(past: Past) -> list[float]:
    """Return the last losses of the others that have warmed up; losses in a warm-up fall too fast to be compared."""
    return [row.loss for row in _others(past) if row.loss is not None and not is_joiner(row, past.options)]


def taught_losses(past: Past) -> list[float]:
    """Return the others' losses from which the usual distance is learned; in the run's first warm-up, those of all
    others.
    """
    known = known_losses(past)
    return known if len(known) >= LEAST_OTHERS else [row.loss for row in _others(past) if row.loss is not None]


def _others(past: Past) -> list[PenaltyRow]:
    return [row for row in past.rows.values() if row.cluster != past.row.cluster]


def excess_loss(loss: float, others: list[float]) -> float | None:
    """Return the share of the others' median by which a loss exceeds it; None without others or with a median of 0."""
    if not others or abs(middle := median(map(bound_loss, others))) < LEAST_LOSS:
        return None
    return (bound_loss(loss) - middle) / abs(middle)


def bound_loss(loss: float) -> float:
    """Clamp a loss to ±LARGEST_LOSS; return LARGEST_LOSS if it is not finite."""
    return max(-LARGEST_LOSS, min(loss, LARGEST_LOSS)) if isfinite(loss) else LARGEST_LOSS
