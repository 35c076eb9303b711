"""The numbers of a step, the rate and the clip of every rule, beside ten lines of Python; and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dips.errors import ConfigError
from dips.outer_step import join_factors, returned_share
from dips.protocol.enums import MergeRule, StepRule
from dips.protocol.options import Clip, OuterOptions
from dips.protocol.rules import STEPS, StepRound, measure_share, rate_of_clusters
from tests import rules_reference
from tests.unit.protocol.ruled_run import (
    STEPS_OF,
    TOKENS,
    check_first_step,
    expected_merge,
    ruled,
)

# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", StepRule)
def test_a_step_is_its_reference(rule: StepRule) -> None:
    for mu, share in ((0.8, 1.0), (0.9, 0.25), (0.5, 0.01)):
        assert STEPS[rule](StepRound(mu, share)) == rules_reference.STEPS[rule](mu, share)


def test_a_whole_cycle_is_nesterov() -> None:
    """Where all push together σ is 1."""
    whole = StepRound(0.8, 1.0)
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


def test_a_relative_clip_is_of_the_norms_before() -> None:
    """A push ten times as long is cut to twice the median of those that were accepted before it."""
    run = ruled(clip=Clip(relative=2.0))
    for _ in range(3):
        run.push_all({"a": 100})
    assert not any(row.clipped for row in run.committed)
    run.staged["a"] = [np.float32(10) * d for d in run.staged["a"]]
    run.push_all({"a": 100})
    assert run.committed[-1].step.scales == pytest.approx((0.2,)) and run.committed[-1].clipped


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"merge": "median"}, "outer.merge: expected mean or rda or rda-paper or edit or edit-paper, .*, got 'median'"),
        ({"step": "adam"}, "outer.step: expected nesterov or sgd or share, .*, got 'adam'"),
        ({"weights": "loss"}, "outer.weights: expected tokens or"),
        ({"lr": "fast"}, "outer.lr: expected a number or auto, got 'fast'"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterOptions(**wrong)


def test_equal_factors_are_one_number() -> None:
    """So the common case, one scale for all layers, is as short as that in orders, rows and journals."""
    assert [join_factors(factors) for factors in ((), (2.0,), (2.0, 2.0), (2.0, 3.0))] == [
        (),
        (2.0,),
        (2.0,),
        (2.0, 3.0),
    ]
