"""The penalty's numbers, each from statistics that are given, so that a changed constant or operator shows."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest

from dips.protocol.enums import GateName
from dips.protocol.gates.norms import LastNorms, is_joiner, spread_factor, student_quantile
from dips.protocol.options import PenaltyOptions
from dips.protocol.penalty import Penalty, believe_world, move_layer
from dips.protocol.records import LayerStatistics, PenaltyRow, ScoreHistory
from dips.protocol.verdicts import PushEvidence, Settled, Verdict

OPTIONS = PenaltyOptions()


def row(cluster: str, *, n: int = 40, mu: float = 1.0, sigma: float = 0.1, **other: float) -> PenaltyRow:
    """Statistics of a cluster that was measured often."""
    values = {"last_norm": mu, "warm_left": 0, "gated_in_a_row": 0, "quarantined": False, "accepted": n} | other
    return PenaltyRow(cluster, n, mu, sigma, **values)  # type: ignore[arg-type]


def judged(penalty: Penalty, norm: float, cluster: str = "a", steps: int = 1) -> Verdict:
    return penalty.judge_push(PushEvidence(cluster, (norm**2,), steps))


def after(penalty: Penalty, verdict: Verdict, cluster: str = "a", live: str = "a") -> tuple[PenaltyRow, ScoreHistory]:
    rows, history = penalty.compute_statistics([Settled(cluster, verdict)], list(live))
    return rows[cluster], history


@pytest.mark.parametrize(("scores", "largest"), [((), 1.0), ((0.5,), 1.0), ((0.0, 2.0), 2.0), ((1e9,), OPTIONS.e_cap)])
def test_the_threshold_is_beta_times_the_largest_score_within_its_bounds(
    scores: tuple[float, ...], largest: float
) -> None:
    """β·min(E_cap, max(1, max E)): a quiet history does not gate everybody, a loud one gates still."""
    penalty = Penalty(OPTIONS, history=ScoreHistory(scores, ()))
    assert penalty.gate_threshold() == pytest.approx(OPTIONS.beta * largest)


def test_a_score_at_the_threshold_enters_and_one_above_it_does_not() -> None:
    """E = (G − μ)/σ with the corrected σ; the limit is β while all scores are small."""
    known = row("a")
    penalty = Penalty(PenaltyOptions(hard_cap=1e6), [known])
    sigma = 0.1 * spread_factor(known.n, OPTIONS.alpha)
    for share, accepted in ((0.99, True), (1.01, False)):
        verdict = judged(penalty, 1.0 + share * OPTIONS.beta * sigma)
        assert verdict.accepted is accepted
        assert verdict.score == pytest.approx(share * OPTIONS.beta)


def test_sigma_is_corrected_while_it_is_young() -> None:
    """After two pushes E[σ²] is α·½, and the next is compared with a mean of two: one degree of freedom."""
    penalty = Penalty(PenaltyOptions(hard_cap=1e6), [row("a", n=2)])
    sigma = 0.1 * sqrt(1.5 / (OPTIONS.alpha / 2)) * student_quantile(1.0) / 3.0
    assert judged(penalty, 1.5).score == pytest.approx(0.5 / sigma)


def test_one_push_has_no_spread() -> None:
    """A warm-up of one round: the second push may be four times as long, since σ counts as large as the norm."""
    assert spread_factor(1, OPTIONS.alpha) == 0.0
    penalty = Penalty(OPTIONS, [row("a", n=1, sigma=0.0)])
    assert judged(penalty, 3.9).accepted and not judged(penalty, 4.1).accepted


@pytest.mark.parametrize(("freedom", "quantile"), [(4.0, 6.620), (5.0, 5.507), (9.0, 4.094), (30.0, 3.270)])
def test_the_quantile_is_students(freedom: float, quantile: float) -> None:
    """P(t > q) = P(z > 3) = 0.00135, from a table, within what Wallace's formula leaves over."""
    assert student_quantile(freedom) == pytest.approx(quantile, rel=0.03)


def test_sigma_has_a_floor() -> None:
    """A history without any spread does not gate what is a little longer."""
    penalty = Penalty(OPTIONS, [row("a", sigma=0.0)])
    assert judged(penalty, 1.0 + OPTIONS.sigma_floor).score == pytest.approx(1.0)


def test_the_mean_becomes_a_moving_average() -> None:
    """Once 1/n < α: μ′ = α·G + (1 − α)·μ and σ′² = (1 − α)·σ² + α·(G − μ′)²."""
    penalty = Penalty(OPTIONS, [row("a", n=1000)])
    known, _ = after(penalty, judged(penalty, 1.1))
    mu = 1.0 + OPTIONS.alpha * 0.1
    assert known.mu == pytest.approx(mu)
    assert known.sigma == pytest.approx(sqrt((1.0 - OPTIONS.alpha) * 0.01 + OPTIONS.alpha * (1.1 - mu) ** 2))


def test_before_that_it_is_the_plain_mean() -> None:
    penalty = Penalty(OPTIONS, [row("a", n=1)])
    known, _ = after(penalty, judged(penalty, 1.1))
    assert known.mu == pytest.approx(1.05)


def test_an_outlier_that_enters_moves_the_mean_by_the_limit_only() -> None:
    """G counts as at most μ + limit·σ."""
    penalty = Penalty(PenaltyOptions(hard_cap=1e6), [row("a", n=1000)])
    known, _ = after(penalty, Verdict(True, 50.0, 2.0, "let in", PushEvidence("a", (2500.0,), 1)))
    sigma = 0.1 * spread_factor(1000, OPTIONS.alpha)
    assert known.mu == pytest.approx(1.0 + OPTIONS.alpha * OPTIONS.beta * sigma, rel=1e-9)


def test_a_warm_up_counts_down() -> None:
    penalty = Penalty(OPTIONS, [row("a", n=1, warm_left=2)])
    known, _ = after(penalty, judged(penalty, 1.0))
    assert known.warm_left == 1


def test_the_cap_of_a_new_cluster_is_that_of_the_median_of_the_others() -> None:
    """One cluster that shouts does not open the door for another."""
    penalty = Penalty(OPTIONS, [row("a", mu=1.0), row("b", mu=1.0), row("c", mu=1000.0)])
    assert judged(penalty, 0.99 * OPTIONS.joiner_cap, "new").accepted
    assert not judged(penalty, 1.01 * OPTIONS.joiner_cap, "new").accepted


def test_others_that_warm_up_themselves_cap_a_new_cluster_less() -> None:
    """A run that has just begun: nobody's norms are usual yet, so the cap is the wide one."""
    penalty = Penalty(OPTIONS, [row("a", warm_left=1), row("b", warm_left=1)])
    assert judged(penalty, 0.99 * OPTIONS.hard_cap, "new").accepted
    assert not judged(penalty, 1.01 * OPTIONS.hard_cap, "new").accepted


def test_without_others_the_initial_model_is_the_cap() -> None:
    """Nobody moves θ by more than its own length; for a norm over √steps, that over √steps, too."""
    penalty = Penalty(OPTIONS, genesis_norm=8.0)
    for steps in (1, 4):
        assert judged(penalty, 7.9, steps=steps).accepted
        assert not judged(penalty, 8.1, steps=steps).accepted


def test_a_norm_is_over_the_root_of_its_steps() -> None:
    assert judged(Penalty(OPTIONS), 6.0, steps=9).norm == pytest.approx(2.0)


def test_the_scores_of_many_rounds_are_kept() -> None:
    """`history` rounds, the oldest leave."""
    history = ScoreHistory(tuple(map(float, range(OPTIONS.history))), ())
    penalty = Penalty(OPTIONS, [row("a")], history)
    _, kept = after(penalty, judged(penalty, 1.0))
    assert kept.scores == (*history.scores[1:], 0.0)


# ---- patience --------------------------------------------------------------------------------------------------------


def gated_again(*others: PenaltyRow, norm: float = 100.0, before: int = OPTIONS.gate_patience - 1) -> PenaltyRow:
    """`a` is gated for one time more, with a norm; the others live, too."""
    penalty = Penalty(OPTIONS, [row("a", gated_in_a_row=before), *others])
    verdict = Verdict(False, norm, 9.0, "gated", PushEvidence("a", (norm**2,), 1))
    return after(penalty, verdict, live="a" + "".join(o.cluster for o in others))[0]


def test_patience_ends_with_the_gate_that_it_names() -> None:
    calm = row("b")
    assert not gated_again(calm, before=OPTIONS.gate_patience - 2).quarantined
    assert gated_again(calm).quarantined


def test_half_of_the_clusters_gated_is_not_the_world() -> None:
    """One of two is quarantined; two of three, and the world has changed: warm up again."""
    assert gated_again(row("b")).quarantined
    both = gated_again(row("b", gated_in_a_row=1), row("c"))
    assert not both.quarantined and both.warm_left == OPTIONS.warmup_rounds


def test_who_is_like_the_median_of_the_others_warms_up_again() -> None:
    """Less than twice the median of the others' norms is no reason for a quarantine; more is, whoever shouts."""
    others = [row("b", mu=1.0), row("c", mu=1.0), row("d", mu=1000.0)]
    assert not gated_again(*others, norm=1.9).quarantined
    assert gated_again(*others, norm=2.1).quarantined


def test_a_push_without_tokens_makes_no_norm_of_0_usual() -> None:
    """Alone and young, with its patience at an end: there is no norm to believe, and it warms up as it was."""
    young = row("a", n=0, mu=0.0, sigma=0.0, gated_in_a_row=OPTIONS.gate_patience - 1, warm_left=2)
    nothing = Verdict(False, 0.0, 0.0, "it brings no tokens", PushEvidence("a", (0.0,), 0))
    moved, _ = after(Penalty(OPTIONS, [young]), nothing)
    assert (moved.accepted, moved.gated_in_a_row, moved.quarantined) == (0, 0, False)


def test_a_layer_that_did_not_move_is_not_measured() -> None:
    """A norm of 0 would make its mean and σ small, and every later norm large; it ends a row of left-out ones."""
    known = LayerStatistics(4, 1.0, 0.1, 2)
    assert move_layer(known, 0.0, False, OPTIONS) == LayerStatistics(4, 1.0, 0.1)
    assert move_layer(known, 1.0, False, OPTIONS).n == 5


@pytest.mark.parametrize(("scored", "tracked"), [(False, True), (True, False), (True, True)])
def test_only_scores_that_are_tracked_set_the_threshold(scored: bool, tracked: bool) -> None:
    """That of a layer, as of another gate, is no score of a norm; an orphan has none."""
    verdict = Verdict(True, 1.0, 1.5, "", PushEvidence("a", (1.0,), 1), scored=scored, tracked=tracked)
    _, history = after(Penalty(OPTIONS, [row("a")]), verdict)
    assert history.scores == ((1.5,) if scored and tracked else (0.0,))


@pytest.mark.parametrize(("steps", "said"), [(1, "after 1 inner step:"), (2, "after 2 inner steps:")])
def test_a_model_that_did_not_move_is_told_with_its_steps(steps: int, said: str) -> None:
    assert said in judged(Penalty(OPTIONS), 0.0, steps=steps).reason


def test_a_world_of_larger_norms_is_believed_beside_what_was_known() -> None:
    """Neither the last norm nor the reference becomes smaller by it."""
    for norm, last in ((5.0, 5.0), (0.5, 1.0)):
        believed = believe_world(row("a", reference=1.0), norm, OPTIONS)
        assert (believed.last_norm, believed.reference) == (last, last)


def test_a_push_that_passes_has_a_score_and_nothing_against_it() -> None:
    """The gate `replay`, beside which it is scored, has no score of its own."""
    verdict = judged(Penalty(OPTIONS, [row("a")]), 1.0)
    assert OPTIONS.gates == ("dips", "replay") and (verdict.scored, verdict.flags) == (True, ())


@pytest.mark.parametrize(
    ("accepted", "warm_left", "joins"), [(0, 10, True), (9, 1, True), (10, 3, False), (5, 0, False), (40, 10, False)]
)
def test_who_joins_is_in_its_first_warm_up(accepted: int, warm_left: int, joins: bool) -> None:
    """Neither in a later one, nor out of it while `dips set` has made warm-ups longer."""
    assert is_joiner(row("a", n=accepted, warm_left=warm_left), OPTIONS) is joins


def test_norms_of_a_warm_up_are_left_out_where_it_is_said() -> None:
    """A joiner is compared with those that have warmed up, others with all that have pushed."""
    rows = [row("a", mu=1.0), row("b", mu=2.0, warm_left=3), row("c", n=0, mu=3.0), row("d", mu=0.0)]
    assert (LastNorms(rows).ordered, LastNorms(rows, warm_only=True).ordered) == ([1.0, 2.0], [1.0])


def test_a_norm_at_the_hard_cap_or_a_score_at_the_limit_passes() -> None:
    """μ 50 and the floor of σ make a norm of 53 a score of 3, the limit of a quiet history."""
    assert judged(Penalty(OPTIONS, [row("a", warm_left=3, reference=1.0)]), 10.0).accepted
    assert not judged(Penalty(OPTIONS, [row("a", warm_left=3, reference=1.0)]), 10.01).accepted
    passed = judged(Penalty(OPTIONS, [row("a", mu=50.0, sigma=0.0)]), 53.0)
    assert passed.accepted and passed.reason.startswith("score 3, at most 3;")


def test_a_layer_is_scored_from_its_second_norm_on_and_left_out_beyond_beta() -> None:
    """Not at it; the largest score of all layers is told."""
    layers = (LayerStatistics(40, 50.0, 0.0), LayerStatistics(2, 50.0, 0.0), LayerStatistics(1, 50.0, 0.0))
    penalty = Penalty(PenaltyOptions(gates=(GateName.EDIT,)), [row("a", layers=layers)])  # type: ignore[arg-type]
    for norms, left_out, said in (
        ((53.0, 50.0, 99.0), set(), "largest score of a layer 3, at most 3"),
        ((50.0, 54.0, 99.0), {1}, "1 of 3 layers above 3 σ of their norms, the largest 4: left out"),
    ):
        verdict = penalty.judge_push(PushEvidence("a", tuple(norm**2 for norm in norms), 1))
        assert (verdict.accepted, verdict.flagged, verdict.reason) == (True, left_out, said)


def test_a_new_warm_up_forgets_no_tokens() -> None:
    """Else one that is readmitted again and again would take its part out of what is usual for all."""
    usual = (100, 200, 300, 400, 500)
    penalty = Penalty(OPTIONS, [replace(row("a"), tokens=usual)])
    limit = penalty.most_tokens()
    assert penalty.readmit_cluster("a").tokens == usual and penalty.most_tokens() == limit is not None
