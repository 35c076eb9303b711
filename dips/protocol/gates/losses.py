"""The gate `loss`: a push whose reported loss is far above the others' is of bad data or a broken trainer.

A cluster's usual distance to the others is allowed for, so data that is harder from the start gates nobody. Only above
them: while losses fall fast every push is below what the others reported last, but that ends. What clusters report is
believed.
"""

from __future__ import annotations

from statistics import median

from dips.protocol.norm_scores import Past, is_joiner
from dips.protocol.verdicts import Finding, Opinion, PushEvidence

MARGIN = 0.15  # of the others' median, above the usual: shuffled targets were at 0.25 at once, healthy ones within 0.08
LEAST_OTHERS = 2  # that gate
LEAST_LOSS = 1e-9  # a median nearer to 0 has no shares


def judge_loss(push: PushEvidence, past: Past) -> Opinion:
    """Gated if its loss is above the median of the others' last ones by its usual share and MARGIN more."""
    if push.loss is None:
        return Opinion(Finding.PASSED, "it reported no loss to compare")
    others = known_losses(past)
    excess = excess_loss(push.loss, others)
    if excess is None:
        return Opinion(Finding.PASSED, "no others' losses to compare its own with")
    usual = past.row.loss_shift
    if usual is None:
        return Opinion(Finding.PASSED, f"loss {push.loss:.4g}: the first after `dips readmit`, which makes it usual")
    said = f"loss {push.loss:.4g} is {100 * excess:+.0f} % of the others' median {median(others):.4g} above it"
    said = f"{said}, usually {100 * usual:+.0f} %"
    if excess <= max(0.0, usual) + MARGIN:
        return Opinion(Finding.PASSED, said)
    if len(others) < LEAST_OTHERS:
        return Opinion(Finding.FLAGGED, f"{said}; one other is too few to say who is right")
    return Opinion(Finding.GATED, said)


def known_losses(past: Past) -> list[float]:
    """The last losses of the others that have warmed up: what the first ones report falls too fast to be compared."""
    rows = past.rows.values()
    return [
        row.loss
        for row in rows
        if row.cluster != past.row.cluster and row.loss is not None and not is_joiner(row, past.options)
    ]


def excess_loss(loss: float, others: list[float]) -> float | None:
    """Share of the others' median by which a loss is above it; None if there is none, or it is 0."""
    if not others or abs(middle := median(others)) < LEAST_LOSS:
        return None
    return (loss - middle) / abs(middle)
