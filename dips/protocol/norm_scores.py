"""Scores of norms (docs/architecture.md#penalty): a push's against its cluster's own, and the cap above all of them.

Pure functions of the statistics; what moves them is in penalty_rows.py.
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
OWN_REFERENCE = 2  # accepted pushes that a cluster's hard cap is made of; before, it is the others' if there are any
MOST_TIMES_STEPS = 16.0  # the usual inner steps: what counts of a claim against the hard cap, a factor of 4 in G


@dataclass(frozen=True, slots=True)
class Past:
    """What a gate knows besides the push itself."""

    options: PenaltyOptions
    row: PenaltyRow  # the cluster's own
    rows: Mapping[str, PenaltyRow]  # everybody's
    norms: LastNorms
    warm_norms: LastNorms  # of those that have warmed up
    history: ScoreHistory
    genesis_norm: float  # ‖θ₀‖, summed over layers; 0: unknown


def has_score(row: PenaltyRow) -> bool:
    """Whether its norms are compared with their mean: not in a warm-up."""
    return row.warm_left == 0 and row.n > 0


def is_joiner(row: PenaltyRow, options: PenaltyOptions) -> bool:
    """Whether it is in its first warm-up: what it has pushed so far says little of what it should."""
    return row.accepted < options.warmup_rounds and row.warm_left > 0


def corrected_sigma(row: PenaltyRow, options: PenaltyOptions) -> float:
    """σ without its bias, as wide as it is uncertain, and not too small. One norm has no spread: its size stands for
    that."""
    share = options.sigma_floor if row.n > 1 else 1.0
    return max(row.sigma * spread_factor(row.n, options.alpha), share * row.mu, LEAST_SIGMA)


def gate_threshold(history: ScoreHistory, options: PenaltyOptions) -> float:
    """β·min(E_cap, max(1, max E)): a quiet history must not gate all, nor a loud one none."""
    largest = max(history.scores, default=1.0)
    return options.beta * min(options.e_cap, max(1.0, largest))


def overclaimed(row: PenaltyRow, inner_steps: int) -> float:
    """By what the hard cap raises G, because only MOST_TIMES_STEPS times the usual inner steps are believed."""
    if row.steps <= 0:
        return 1.0
    return sqrt(max(1.0, inner_steps / (MOST_TIMES_STEPS * row.steps)))


def hard_cap(past: Past, inner_steps: int) -> tuple[float, str]:
    """(the norm above which even a warm-up is gated, what it is made of); no warm-up begins the reference anew."""
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
    """No push moves θ by more than its own length."""
    return genesis_norm / sqrt(max(1, inner_steps)) if genesis_norm > 0 else float("inf")
