"""Gates of a push's norm, whole or by layer, against its cluster's own past, and the scores they compare."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import exp, sqrt

from dips.dataclass import dataclass
from dips.protocol.options import PenaltyOptions
from dips.protocol.records import LayerStatistics, PenaltyRow, ScoreHistory
from dips.protocol.verdicts import Finding, Opinion, PushEvidence

# ---- last norms -----------------------------------------------------------------------------------------------------
# The last accepted norms of all clusters, sorted, to compare a cluster's norm with the median of the others'.
#
# Pure. Kept beside the penalty's statistics, so that a median does not visit every cluster.


def median_without(ordered: Sequence[float], skip: int) -> float:
    """Return the median of ascending numbers without the one in this place; there must be others."""
    count = len(ordered) - (skip < len(ordered))
    low, high = (ordered[i + (i >= skip)] for i in ((count - 1) // 2, count // 2))
    return low if count % 2 else (low + high) / 2


class LastNorms:
    """The last norm of each cluster with an accepted push; with `warm_only`, of those that have warmed up."""

    def __init__(self, rows: Iterable[PenaltyRow], warm_only: bool = False) -> None:
        self.warm_only = warm_only
        self.ordered = sorted(row.last_norm for row in rows if self._counts(row))

    def replace_row(self, old: PenaltyRow | None, new: PenaltyRow) -> None:
        """Update a cluster's norm after its statistics have changed."""
        if old is not None and self._counts(old):
            del self.ordered[bisect_left(self.ordered, old.last_norm)]
        if self._counts(new):
            insort(self.ordered, new.last_norm)

    def median_without(self, row: PenaltyRow) -> float | None:
        """Return the median of the other clusters' norms; None if there are none."""
        skip = bisect_left(self.ordered, row.last_norm) if self._counts(row) else len(self.ordered)
        return median_without(self.ordered, skip) if len(self.ordered) > self._counts(row) else None

    def _counts(self, row: PenaltyRow) -> bool:
        return row.accepted > 0 and row.last_norm > 0 and not (self.warm_only and row.warm_left)


# ---- spread ---------------------------------------------------------------------------------------------------------
# The correction of the penalty's σ for the number of pushes that it was computed from.
#
# Its residuals are taken from a mean that contains them, of few pushes at first, and the next push is compared with
# that mean, not with the true one. So σ is divided by its expectation for σ_true = 1, and widened to Student's
# quantile: a score of 3 is then exceeded by 1.35 in 1,000 healthy pushes, after ten as after a thousand.


NORMAL_QUANTILE = 3.0  # where the widened σ has the same tail as a normal one: the paper's β
MEMORIES = 20.0  # in 1/α: after so many pushes the factor no longer changes
MOST_TERMS = 20_000  # pushes that are summed at most: an α of 1e-6 must not make a judgement slow


@lru_cache(maxsize=4096)
def spread_factor(n: int, alpha: float) -> float:
    """Return the factor on the σ of n pushes; 0 if they have no spread, as for one."""
    share, squares, of_mean = 0.0, 0.0, 1.0  # E[σ²], and Σ of its squared weights; variance of the mean
    for k in range(2, min(n, int(MEMORIES / alpha), MOST_TERMS) + 1):
        weight = max(alpha, 1.0 / k)
        residual = (1.0 - weight) ** 2 * (1.0 + of_mean)
        of_mean = weight**2 + (1.0 - weight) ** 2 * of_mean
        share = (1.0 - alpha) * share + alpha * residual
        squares = (1.0 - alpha) ** 2 * squares + (alpha * residual) ** 2
    if share <= 0.0:
        return 0.0
    freedom = share**2 / squares
    return sqrt((1.0 + of_mean) / share) * student_quantile(freedom) / NORMAL_QUANTILE


def student_quantile(freedom: float) -> float:
    """Return the quantile of Student's t with the tail of a normal at NORMAL_QUANTILE (Wallace 1959)."""
    z = NORMAL_QUANTILE * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    return sqrt(freedom * (exp(min(z * z / freedom, 50.0)) - 1.0))


# ---- norm scores ----------------------------------------------------------------------------------------------------
# Scores of norms (docs/architecture.md#penalty): of a push against its cluster's own past, and the hard cap.
#
# Pure functions of the statistics, which penalty.py updates.


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
    return row.warm_left == 0


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


# ---- norms ----------------------------------------------------------------------------------------------------------


def judge_norm(push: PushEvidence, past: Past) -> Opinion:
    """Gate a push with score E = (G − μ)/σ above β·min(E_cap, max(1, max E)), or with a norm above the hard cap."""
    row, options, g = past.row, past.options, push.norm
    held, (cap, of) = g * overclaimed(row, push.inner_steps), hard_cap(past, push.inner_steps)
    if held > cap:
        return Opinion(Finding.GATED, f"norm {held:.4g} above the hard cap {cap:.4g}, {of}")
    if push.exempt:
        return Opinion(Finding.PASSED, "its base is no ancestor: exempt from the score")
    if not has_score(row):
        return Opinion(Finding.PASSED, f"warm-up, {row.warm_left} pushes left")
    sigma, limit = corrected_sigma(row, options), gate_threshold(past.history, options)
    score, own = ((norm - row.mu) / sigma for norm in (g, push.own_norm))
    if own > limit:
        said = f"score {score:.3g} above {limit:.3g} (norm {g:.4g}, mean {row.mu:.4g})"
        return Opinion(Finding.GATED, said, score)
    if score > limit:
        said = f"score {score:.3g}, {own:.3g} without what θ moved since its base: at most {limit:.3g}"
        return Opinion(Finding.PASSED, said, own, scored=True)
    return Opinion(Finding.PASSED, f"score {score:.3g}, at most {limit:.3g}", score, scored=True)


def judge_norm_literally(push: PushEvidence, past: Past) -> Opinion:
    """Gate a push with score E = (G − μ)/σ above β·max E of accepted pushes; σ not corrected, no warm-up, no cap."""
    row, options = past.row, past.options
    if push.exempt or not row.sigma:  # one push has no σ, nor have equal ones
        return Opinion(Finding.PASSED, "no score: nothing to compare its norm with")
    score = (push.norm - row.mu) / row.sigma
    if not any(past.history.scores):  # a round without a score counts as 0
        return Opinion(Finding.PASSED, f"score {score:.3g}, the first", score, scored=True)
    limit = options.beta * max(past.history.scores)
    if score > limit:
        return Opinion(Finding.GATED, f"score {score:.3g} above {limit:.3g} (norm {push.norm:.4g})", score)
    return Opinion(Finding.PASSED, f"score {score:.3g}, at most {limit:.3g}", score, scored=True)


# ---- layers ----------------------------------------------------------------------------------------------------------
# The gate `edit` (EDiT §3.2): a z-test of each layer's norm. Layers that fail it are left out of the sum; a push is
# accepted if at least one of its layers passes. σ is corrected and floored as for the gate `dips`.


def judge_layers(push: PushEvidence, past: Past) -> Opinion:
    """Leave out layers with z = (G − μ)/σ above β; gate the push if all layers fail."""
    if past.row.warm_left > 0 or push.exempt or len(past.row.layers) != len(push.layer_sq):
        return Opinion(Finding.PASSED, "its layers have no score yet")
    norms, moving = layer_norms(push), 0
    scores = dict[int, float]()
    for place, (norm, layer) in enumerate(zip(norms, past.row.layers, strict=True)):
        if norm > 0.0:
            moving += 1
            scores[place] = score_layer(norm, layer, past.options)
    worst = max(scores.values(), default=0.0)
    flagged = frozenset(place for place, score in scores.items() if score > past.options.beta)
    if not flagged:
        return Opinion(Finding.PASSED, f"largest score of a layer {worst:.3g}, at most {past.options.beta:g}", worst)
    said = f"{len(flagged)} of {moving} layers above {past.options.beta:g} σ of their norms, the largest {worst:.3g}"
    if len(flagged) == moving:
        return Opinion(Finding.GATED, said, worst)
    return Opinion(Finding.FLAGGED, f"{said}: left out", worst, flagged=flagged)


def layer_norms(push: PushEvidence) -> list[float]:
    """Return the norm of each layer, as it is scored."""
    return [norm_per_step(sq, push.inner_steps) for sq in push.layer_sq]


def norm_per_step(square: float, inner_steps: int) -> float:
    """Return ‖d‖₂ / √(inner steps); the division makes clusters of different paces comparable."""
    return sqrt(square / max(1, inner_steps))


def score_layer(norm: float, layer: LayerStatistics, options: PenaltyOptions) -> float:
    """Return the z-score of a layer's norm; 0 while fewer than two norms of the layer are known."""
    if layer.n < 2:
        return 0.0
    sigma = layer.sigma * spread_factor(layer.n, options.alpha)
    return (norm - layer.mu) / max(sigma, options.sigma_floor * layer.mu, LEAST_SIGMA)
