"""Every rule, from the options to θ: the Coordinator, a slave's memory and kernels, beside ten lines of Python."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from dips.dataclass import replace
from dips.protocol.enums import MergeRule, StepRule, WeightRule
from dips.protocol.options import OuterOptions
from dips.protocol.penalty import Penalty
from dips.protocol.rules import (
    MERGES,
    WEIGHTS,
    LayerShare,
    Merge,
    has_direction,
    scale_layer,
    scale_softmax,
    weigh_last,
    weigh_mean,
)
from dips.protocol.verdicts import PushEvidence, Verdict
from tests import rules_reference
from tests.unit.protocol.ruled_run import (
    BLOCKS,
    BUFFERS,
    START,
    STEPS_OF,
    TOKENS,
    check_first_step,
    draw_difference,
    expected_merge,
    pushed,
    ruled,
)


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
    run = ruled(merge=merge, weights="uniform", step="share")
    run.push_all(TOKENS, STEPS_OF)
    shares = [n / sum(TOKENS.values()) for n in TOKENS.values()]
    means = sum(w * (START - run.staged[name][BUFFERS]) for w, name in zip(shares, TOKENS, strict=True))
    assert run.theta[BUFFERS] == pytest.approx(means, rel=1e-5)


def test_a_rule_as_the_guides_has_a_scale_where_no_push_counts() -> None:
    """Norms of shared buffers are 0: its first round with some ended each master with a ZeroDivisionError."""
    rule, share = Merge(weigh_mean, scale_softmax, has_direction), LayerShare(100.0, 0.0, 4)
    weight = weigh_last(rule, [], share)
    assert (weight, scale_layer(rule, [share], [weight], 0.0)) == (0.0, 1.0)


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

    def judge(self: Penalty, push: PushEvidence) -> Verdict:
        return replace(honest(self, push), flagged=flags[push.cluster])

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
    shares = [LayerShare(100.0, norm, 4) for norm in norms]
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


def test_the_weight_of_a_push() -> None:
    assert [WEIGHTS[rule](600) for rule in WeightRule] == [600.0, 1.0]
