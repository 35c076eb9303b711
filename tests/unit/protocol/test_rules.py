"""Every rule, from the options to θ: the Coordinator, a slave's memory and kernels, beside ten lines of Python."""

from __future__ import annotations

from math import exp, sqrt
from typing import Any

import numpy as np
import pytest

from dips.dataclass import replace
from dips.errors import ConfigError
from dips.outer_step import returned_share
from dips.protocol.enums import MergeRule, StepRule, WeightRule
from dips.protocol.options import Clip, OuterOptions
from dips.protocol.penalty import Penalty, Verdict
from dips.protocol.rules.merges import MERGES, LayerShare, scale_layer, weigh_last
from dips.protocol.rules.rates import rate_of_clusters
from dips.protocol.rules.steps import STEPS, StepRound, measure_share
from dips.protocol.rules.weights import WEIGHTS, measure_freshness
from tests import rules_reference
from tests.unit.protocol.ruled_run import BLOCKS, BUFFERS, START, RuledRun, draw_difference, pushed

PLAIN = {"clip": Clip()}
TOKENS, STEPS_OF = {"a": 100, "b": 300, "c": 50}, {"a": 4, "b": 16, "c": 1}


def ruled(**outer: Any) -> RuledRun:
    run = RuledRun(OuterOptions(**{**PLAIN, **outer}))
    run.staged = {name: draw_difference(seed) for seed, name in enumerate(TOKENS)}
    run.train(*TOKENS)
    return run


def expected_merge(run: RuledRun, outer: OuterOptions) -> list[list[float] | None]:
    pushes = [pushed(run.staged[name], TOKENS[name], STEPS_OF[name]) for name in TOKENS]
    return [rules_reference.merge_layer(outer, pushes, layer, layer in BLOCKS) for layer in range(BUFFERS)]


def check_first_step(run: RuledRun, merged: list[list[float] | None], numbers: tuple[float, ...], lr: float) -> None:
    """θ of the first version is the reference's; m was 0."""
    for layer, g in enumerate(merged):
        assert g is not None
        made = [rules_reference.take_step(START, 0.0, x, lr, numbers)[0] for x in g]
        assert run.theta[layer] == pytest.approx(made, rel=2e-6), f"layer {layer}"


@pytest.mark.parametrize("weights", WeightRule)
@pytest.mark.parametrize("merge", MergeRule)
def test_a_merge_is_its_reference(merge: MergeRule, weights: WeightRule) -> None:
    """Folded one after another about the first push in fp32, and all at once in fp64: the same step."""
    run = ruled(merge=merge, weights=weights)
    run.push_all(TOKENS, STEPS_OF)
    merged = expected_merge(run, OuterOptions(merge=merge, weights=weights))
    check_first_step(run, merged, (0.8, 1.0, 1.0, 0.8), 0.7)
    norm = sqrt(sum(rules_reference.norm_of(g or []) ** 2 for g in merged))
    assert run.committed[-1].delta_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("merge", MergeRule)
def test_buffers_are_averaged_by_tokens_whatever_the_rule(merge: MergeRule) -> None:
    run = ruled(merge=merge, weights="uniform", step="share", staleness_alpha=0.5)
    run.push_all(TOKENS, STEPS_OF)
    shares = [n / sum(TOKENS.values()) for n in TOKENS.values()]
    means = sum(w * (START - run.staged[name][BUFFERS]) for w, name in zip(shares, TOKENS, strict=True))
    assert run.theta[BUFFERS] == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize("weights", WeightRule)
@pytest.mark.parametrize("merge", MergeRule)
def test_equal_pushes_make_the_step_of_one(merge: MergeRule, weights: WeightRule) -> None:
    """A constant model: whatever the rule, the mean of what is equal is that."""
    run, alone = ruled(merge=merge, weights=weights), ruled()
    run.staged = alone.staged = dict.fromkeys(TOKENS, draw_difference(7))
    run.push_all(TOKENS)
    alone.push_all({"a": 100})
    for made, one in zip(run.theta, alone.theta, strict=True):
        assert made == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("merge", MergeRule)
def test_one_cluster_alone_is_every_merge(merge: MergeRule) -> None:
    """There is nobody to be compared with: its pseudo-gradient is the step's, up to rounding."""
    run, plain = ruled(merge=merge), ruled()
    for one in (run, plain):
        one.push_all({"b": 300}, {"b": 16})
    for made, expected in zip(run.theta, plain.theta, strict=True):
        assert made == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("merge", MergeRule)
def test_pushes_that_did_not_move_divide_by_nothing(merge: MergeRule) -> None:
    """One frozen layer of one, then of all: finite, and momentum goes on."""
    run = ruled(merge=merge)
    for name in ("a", "b", "c"):
        run.staged[name][1][:] = 0.0
        run.push_all({"a": 100, "b": 300, "c": 50})
        assert all(np.isfinite(layer).all() for layer in run.theta)
    before = run.theta[1]
    run.push_all({"a": 100, "b": 300, "c": 50})
    assert (run.theta[1] != before).any(), "the layer's momentum moves it on"


def test_the_common_case_is_one_number() -> None:
    """Orders and rows of the mean by tokens do not grow with the layers."""
    run = ruled()
    run.push_all(TOKENS)
    row = run.committed[-1]
    assert [f.layer_weights for f in row.folds] == [(), (), ()] and len(row.step.scales) == 1
    assert len(run.applied[-1].step.scales) == 1
    uniform = ruled(weights="uniform")
    uniform.push_all(TOKENS)
    assert [f.layer_weights for f in uniform.committed[-1].folds] == [(), (1.0,), (1.0,)]


# ---- flagged layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", MergeRule)
def test_a_flagged_layer_does_not_count(merge: MergeRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first push layers 0 and 2, of all layer 1: the others make those, and layer 1 stays as it was."""
    flags = {"a": frozenset({0, 1, 2}), "b": frozenset({1}), "c": frozenset({1})}
    honest = Penalty.judge_push

    def judge(self: Penalty, cluster: str, *more: Any) -> Verdict:
        return replace(honest(self, cluster, *more), flagged=flags[cluster])

    monkeypatch.setattr(Penalty, "judge_push", judge)
    run, outer = ruled(merge=merge), OuterOptions(merge=merge)
    run.push_all(TOKENS, STEPS_OF)
    pushes = [replace(pushed(run.staged[name], TOKENS[name], STEPS_OF[name]), flagged=flags[name]) for name in TOKENS]
    merged = [rules_reference.merge_layer(outer, pushes, layer, layer in BLOCKS) for layer in range(BUFFERS)]
    assert merged[1] is None
    merged[1] = [0.0] * 8
    check_first_step(run, merged, (0.8, 1.0, 1.0, 0.8), 0.7)
    assert run.committed[-1].step.scales[1] == 0.0


@pytest.mark.parametrize("rule", StepRule)
def test_a_layer_that_every_push_is_flagged_in_stays(rule: StepRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its momentum neither moves it nor fades, as EDiT rolls back; the others step on."""
    run = ruled(step=rule)
    run.push_all(TOKENS)
    theta, m = run.theta, run.memory.momentum(run.head)[1].copy()
    honest = Penalty.judge_push
    flagged = frozenset({1})
    monkeypatch.setattr(Penalty, "judge_push", lambda *asked: replace(honest(*asked), flagged=flagged))
    run.push_all(TOKENS)
    assert run.theta[1].tobytes() == theta[1].tobytes() and run.memory.momentum(run.head)[1].tobytes() == m.tobytes()
    assert (run.theta[2] != theta[2]).all()


# ---- extremes of a merge ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", MergeRule)
@pytest.mark.parametrize("norms", [(1e-30, 1e20), (1e20, 1e-30), (0.0, 1.0), (0.0, 0.0), (800.0, 1.0), (1.0, 800.0)])
def test_no_norm_makes_a_weight_that_is_not_a_number(merge: MergeRule, norms: tuple[float, float]) -> None:
    """Exponents and quotients are bounded; the scale is a number at least 0."""
    shares = [LayerShare(100.0, 1.0, norm, 4) for norm in norms]
    weights = [weigh_last(MERGES[merge], shares[:i], shares[i]) for i in range(2)]
    assert all(0.0 <= w <= 2.0**100 for w in weights) and weights[0] in (0.0, 1.0)
    assert 0.0 < scale_layer(MERGES[merge], shares, weights, 0.0) <= 2.0**100


def test_directions_that_cancel_leave_no_step() -> None:
    """Two opposite vectors have no mean direction: rounding is not blown up to their length."""
    run = ruled(merge="rda")
    run.staged["b"] = [np.float32(-3) * d for d in run.staged["a"]]
    run.push_all({"a": 100, "b": 100})
    for layer in BLOCKS:
        assert run.theta[layer] == pytest.approx([START] * 8, abs=1e-6)


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_a_stale_push_weighs_less() -> None:
    """e^(−α·staleness), in every merge; what is fresh is not touched."""
    run = ruled(staleness_alpha=0.5)
    late = run.open_push("b")
    run.push_all({"a": 100})
    run.push_all({"a": 100})
    run.commit(late, 100, 4)
    run.push_all({"a": 100})
    assert [f.layer_weights for f in run.committed[-1].folds] == [(), (pytest.approx(exp(1.0)),)]
    assert measure_freshness(0.5, -3) == 1.0 and measure_freshness(9.0, 10**9) > 0.0


def test_the_weight_of_a_push() -> None:
    assert [WEIGHTS[rule](600, 3) for rule in WeightRule] == [600.0, 200.0, 1.0]
    assert WEIGHTS[WeightRule.TOKENS_PER_STEP](600, 0) == 600.0


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", StepRule)
@pytest.mark.parametrize("nth", [True, False])
def test_a_step_is_its_reference(rule: StepRule, nth: bool) -> None:
    for mu, share in ((0.8, 1.0), (0.9, 0.25), (0.5, 0.01)):
        assert STEPS[rule](StepRound(mu, share, nth)) == rules_reference.STEPS[rule](mu, share, nth)


def test_a_whole_cycle_is_nesterov() -> None:
    """Where all push together σ is 1 and every contribution the N-th."""
    whole = StepRound(0.8, 1.0, True)
    assert {STEPS[rule](whole) for rule in StepRule if rule != StepRule.SGD} == {(0.8, 1.0, 1.0, 0.8)}


def test_the_share_of_a_round() -> None:
    """Its tokens over a cycle's; who has no accepted push counts as the mean of the others."""
    assert measure_share({"a": 100}, {"a": 90, "b": 300}) == pytest.approx(0.25)
    assert measure_share({"a": 100}, {"a": 0, "b": 0}) == pytest.approx(0.5)
    assert measure_share({"a": 100, "b": 100}, {"a": 1, "b": 0, "c": 200, "d": 0}) == pytest.approx(200 / 533.3333333)
    assert measure_share({"a": 100, "b": 5}, {"a": 100, "b": 5}) == 1.0
    assert measure_share({"gone": 100}, {"b": 300}) == pytest.approx(0.25), "a cluster that left had its part"


def test_a_run_steps_by_its_share() -> None:
    """One of three clusters pushes alone: σ is a third, then as their tokens say."""
    run = ruled(step="share", weights="tokens")
    run.push_all({"a": 100})
    run.push_all({"b": 300})
    run.push_all({"c": 50})
    run.push_all({"a": 100})
    shares = [row.step.c for row in run.committed]
    assert shares == pytest.approx([1 / 3, 300 / 600, 50 / 450, 100 / 450])
    assert [row.step.numbers for row in run.committed] == [pytest.approx((0.8**s, s, s, 0.8**s)) for s in shares]


@pytest.mark.parametrize(("delay", "acts"), [(2, (False, True, False, True)), (0, (False, False, True, False))])
def test_momentum_acts_with_every_nth_contribution(delay: int, acts: tuple[bool, ...]) -> None:
    """By default with as many as there are live clusters."""
    run = ruled(step="delayed_nesterov", delay=delay)
    for name in ("a", "b", "c", "a"):
        run.push_all({name: 100})
    assert tuple(row.step.e > 0 for row in run.committed) == acts
    assert all(row.step.returned == returned_share(0.7, (0.8, 1.0, 1.0, 0.8)) for row in run.committed)
    between = next(row.step for row in run.committed if row.step.e == 0)
    assert between.numbers == (1.0, pytest.approx(between.c / 0.8), between.c, 0.0)


def test_what_comes_back_of_a_deficit_is_all_of_it() -> None:
    """Over the later steps of the same numbers, whatever they are."""
    for numbers in ((0.8, 1.0, 1.0, 0.8), (0.9457, 0.25, 0.25, 0.9457)):
        theta, m = 0.0, -returned_share(0.7, numbers)
        for _ in range(2000):
            theta, m = rules_reference.take_step(theta, m, 0.0, 0.7, numbers)
        assert theta == pytest.approx(1.0)
    assert returned_share(0.7, (0.0, 1.0, 1.0, 0.0)) == 0.0


def test_the_rate_of_so_many_clusters() -> None:
    rates = [rate_of_clusters(n) for n in (1, 2, 3, 4, 6, 8, 9, 1000)]
    assert rates == pytest.approx([0.4, 0.6, 0.6, 0.6, rules_reference.rate_of(6), 0.8, 0.8, 0.8])
    run = ruled(lr="auto")
    run.push_all({"a": 100})
    assert run.committed[-1].step.lr == pytest.approx(0.6), "three clusters live"


# ---- clip ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", MergeRule)
@pytest.mark.parametrize("per_layer", [False, True])
def test_a_clip_is_its_reference(merge: MergeRule, per_layer: bool) -> None:
    """Of the whole model, or of each layer: the long ones only."""
    clip = Clip(norm=0.4, per_layer=per_layer)
    run = ruled(merge=merge, clip=clip)
    run.push_all(TOKENS, STEPS_OF)
    merged = expected_merge(run, OuterOptions(merge=merge))
    check_first_step(run, rules_reference.clip_all(clip, merged), (0.8, 1.0, 1.0, 0.8), 0.7)
    assert run.committed[-1].clipped


def test_a_relative_clip_of_layers_is_of_their_own_norms() -> None:
    """Layer 2 grows tenfold and is cut to twice its median; the others are as they were."""
    run = ruled(clip=Clip(relative=2.0, per_layer=True))
    for _ in range(3):
        run.push_all({"a": 100})
    assert not any(row.clipped for row in run.committed)
    run.staged["a"][2] *= np.float32(10)
    run.push_all({"a": 100})
    scales = run.committed[-1].step.scales
    assert scales == pytest.approx((1.0, 1.0, 0.2, 1.0, 1.0)) and run.committed[-1].clipped
    assert len(run.committed[-1].history.layer_norms) == 4


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"merge": "median"}, "outer.merge: expected mean or rda or edit or edit-paper, got 'median'"),
        ({"step": "adam"}, "outer.step: expected nesterov or sgd or share or delayed_nesterov, got 'adam'"),
        ({"weights": "loss"}, "outer.weights: expected tokens or"),
        ({"staleness_alpha": -0.1}, "outer.staleness_alpha: expected 0 or more, got -0.1"),
        ({"delay": -1}, "outer.delay: expected 0 to 1000000, got -1"),
        ({"lr": "fast"}, "outer.lr: expected a number above 0 or auto, got 'fast'"),
        ({"step": "delayed_nesterov", "momentum": 0.0}, "outer.momentum: expected a number above 0, beside"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterOptions(**wrong)
