"""Gates of a push's norm against its cluster's own past: `dips`, and `dips-paper`, the literal rule of §4.1."""

from __future__ import annotations

from dips.protocol.norm_scores import (
    Past,
    corrected_sigma,
    gate_threshold,
    hard_cap,
    has_score,
    overclaimed,
)
from dips.protocol.verdicts import Finding, Opinion, PushEvidence

LITERAL_LEAST = 2  # pushes before σ is defined; the paper has no warm-up


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
    if push.exempt or row.n < LITERAL_LEAST or row.sigma <= 0.0:
        return Opinion(Finding.PASSED, "no score: nothing to compare its norm with")
    score = (push.norm - row.mu) / row.sigma
    if not any(past.history.scores):  # a round without a score counts as 0
        return Opinion(Finding.PASSED, f"score {score:.3g}, the first", score, scored=True)
    limit = options.beta * max(past.history.scores)
    if score > limit:
        return Opinion(Finding.GATED, f"score {score:.3g} above {limit:.3g} (norm {push.norm:.4g})", score)
    return Opinion(Finding.PASSED, f"score {score:.3g}, at most {limit:.3g}", score, scored=True)
