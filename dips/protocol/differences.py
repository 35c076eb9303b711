"""Lasting differences of a cluster from the others, for status and page; no push is gated for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from dips.protocol.enums import Difference, GateName
from dips.protocol.gates.direction import LEARNED_COSINES, LEAST_USUAL, LEAST_WITNESSES, LIKE
from dips.protocol.gates.losses import LEARNED, MARGIN
from dips.protocol.options import PenaltyOptions
from dips.protocol.records import PenaltyRow


def find_differences(row: PenaltyRow, rows: Iterable[PenaltyRow], options: PenaltyOptions) -> dict[Difference, str]:
    """Return the cluster's lasting differences with a sentence each, from statistics of the gates that are on."""
    found = dict[Difference, str]()
    if GateName.LOSS in options.gates and row.losses >= LEARNED and row.loss_shift > MARGIN:
        found[Difference.LOSS] = (
            f"its loss is usually {100 * row.loss_shift:+.0f} % of the others' above theirs: harder data, or data that "
            "was bad from the start"
        )
    others = [r.cosine for r in rows if r.cluster != row.cluster and r.cosines >= LEARNED_COSINES]
    if GateName.DIRECTION not in options.gates or row.cosines < LEARNED_COSINES or len(others) < LEAST_WITNESSES:
        return found
    usual = median(others)
    if usual >= LEAST_USUAL and row.cosine < LIKE * usual:
        found[Difference.DIRECTION] = (
            f"its pushes usually have a cosine of {row.cosine:.2f} with the others', theirs have {usual:.2f}: data of "
            "another kind, or pushes that were bad from the start"
        )
    return found
