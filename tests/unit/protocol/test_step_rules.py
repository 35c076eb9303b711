"""The numbers of a step, the rate and the clip of every rule, beside ten lines of Python; and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dips.errors import ConfigError
from dips.outer_step import returned_share
from dips.protocol.enums import MergeRule, StepRule
from dips.protocol.options import Clip, OuterOptions
from dips.protocol.rules.rates import rate_of_clusters
from dips.protocol.rules.steps import STEPS, StepRound, measure_share
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
        ({"staleness_alpha": -0.1}, "outer.staleness_alpha: expected 0, or 1e-06 to 1e\\+06, got -0.1"),
        ({"delay": -1}, "outer.delay: expected 0 to 1000000, got -1"),
        ({"lr": "fast"}, "outer.lr: expected a number or auto, got 'fast'"),
        ({"step": "delayed_nesterov", "momentum": 0.0}, "outer.momentum: expected a number above 0, beside"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterOptions(**wrong)
