"""Scores of norms (docs/architecture.md#penalty): of a push against its cluster's own past, and the hard cap.

Pure functions of the statistics, which penalty_rows.py updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from dips.dataclass import dataclass
from dips.protocol.last_norms import LastNorms
from dips.protocol.options import PenaltyOptions
from dips.protocol.records import PenaltyRow, ScoreHistory
from dips.protocol.spread import spread_factor

LEAST_SIGMA = 1e-30
OWN_REFERENCE = 2  # accepted pushes from which a cluster's own hard cap is made; before, the others' is used
MOST_TIMES_STEPS = 16.0  # of the usual inner steps: more do not count against the hard cap: at most a factor of 4 in G


@dataclass(frozen=True, slots=True)
class Past:
    """The knowledge of a gate besides the push itself."""

    options: PenaltyOptions
    row: PenaltyRow  # of the push's cluster
    rows: Mapping[str, PenaltyRow]  # of all clusters
    norms: LastNorms
    warm_norms: LastNorms  # norms of clusters that have warmed up
    history: ScoreHistory
    genesis_norm: float  # ‖θ₀‖, summed over layers; 0: unknown


def has_score(row: PenaltyRow) -> bool:
    """Whether the cluster's norms are compared with their mean: not in a warm-up."""
    return row.warm_left == 0 and row.n > 0


def is_joiner(row: PenaltyRow, options: PenaltyOptions) -> bool:
    """Whether the cluster is in its first warm-up, when its past pushes do not tell yet what is usual."""
    return row.accepted < options.warmup_rounds and row.warm_left > 0


def corrected_sigma(row: PenaltyRow, options: PenaltyOptions) -> float:
    """Return σ corrected for its bias and widened by its uncertainty, with a floor; for one norm, the norm itself."""
    share = options.sigma_floor if row.n > 1 else 1.0
    return max(row.sigma * spread_factor(row.n, options.alpha), share * row.mu, LEAST_SIGMA)


def gate_threshold(history: ScoreHistory, options: PenaltyOptions) -> float:
    """Return β·min(E_cap, max(1, max E)), bounded so that neither small nor large past scores disarm the gate."""
    largest = max(history.scores, default=1.0)
    return options.beta * min(options.e_cap, max(1.0, largest))


def overclaimed(row: PenaltyRow, inner_steps: int) -> float:
    """Return the factor on G for the hard cap: at most MOST_TIMES_STEPS times the usual inner steps are believed."""
    if row.steps <= 0:
        return 1.0
    return sqrt(max(1.0, inner_steps / (MOST_TIMES_STEPS * row.steps)))


def hard_cap(past: Past, inner_steps: int) -> tuple[float, str]:
    """Return (the norm above which even a warm-up is gated, its origin in words); a new warm-up keeps the reference."""
    row, options = past.row, past.options
    factor = options.hard_cap
    if is_joiner(row, options) and (others := past.warm_norms.median_without(row)) is not None:
        return options.joiner_cap * others, f"{options.joiner_cap:g} × the others' median"
    if row.accepted >= OWN_REFERENCE and row.reference > 0:
        return factor * row.reference, f"{factor:g} × its usual norm"
    if (others := past.norms.median_without(row)) is not None:
        return factor * others, f"{factor:g} × the others' median"
    if row.reference > 0:
        return factor * row.reference, f"{factor:g} × its usual norm"
    return longest_step(past.genesis_norm, inner_steps), "the initial model's own norm"


def longest_step(genesis_norm: float, inner_steps: int) -> float:
    """Return G of a push that moves θ by its own length, the most that is plausible; inf if ‖θ₀‖ is unknown."""
    return genesis_norm / sqrt(max(1, inner_steps)) if genesis_norm > 0 else float("inf")
