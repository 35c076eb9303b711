"""What replicas count in a sync of the mesh is what clusters would count at the parameter servers."""

from __future__ import annotations

from math import inf, nan, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.config import Shared
from dips.errors import ConfigError
from dips.inside.mesh.merging import Interval, ReplicaMerges
from dips.outer_step import factor_at
from dips.protocol import events as ev
from dips.protocol.effects import Apply, Fold, Measure
from dips.protocol.options import Clip, OuterOptions
from tests.unit.protocol.ruled_run import NAMES, RuledRun

ROUNDS = 60
CLIP = {"norm": 2.0, "per_layer": True}
EDIT = {"merge": "edit-paper", "step": "nesterov", "lr": 0.8, "momentum": 0.85, "clip": CLIP}


def rules(outer: dict[str, Any], *gates: str, **penalty: Any) -> Shared:
    return Shared.model_validate({"run": "r", "outer": outer, "penalty": {"gates": gates, **penalty}})


class WatchedRun(RuledRun):
    """Keeps what a slave measured and was told of the last round, in the order of folding."""

    def __init__(self, outer: OuterOptions) -> None:
        self.squares: dict[str, tuple[float, ...]] = {}
        self.folds: list[Fold] = []
        self.last_apply: Apply | None = None
        self.acc_sq: tuple[float, ...] = ()
        super().__init__(outer)

    def _answer(self, body: Any) -> Any:
        answer = super()._answer(body)
        if isinstance(body, Measure) and isinstance(answer, ev.Measured):
            self.squares[body.push.cluster] = answer.layer_sq
        elif isinstance(body, Fold):
            self.folds.append(body)
            self.acc_sq = answer.acc_sq
        elif isinstance(body, Apply):
            self.last_apply = body
        return answer


@settings(max_examples=ROUNDS, deadline=None)
@given(
    st.sampled_from(["edit-paper", "edit", "mean"]),
    st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 64), st.floats(1e-3, 4.0)), min_size=2, max_size=4),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_shares_are_the_servers(merge: str, pushes: list[tuple[int, int, float]], clipped: bool, seed: int) -> None:
    """60 random rounds: weight times scale of each replica in each layer, and the step's numbers, to 1e-12."""
    clip = Clip(2.0, per_layer=True) if clipped else Clip()
    run = WatchedRun(OuterOptions(0.8, 0.85, clip, merge, "nesterov"))
    rng, names = np.random.default_rng(seed), [f"c{i}" for i in range(len(pushes))]
    for name, (_, _, length) in zip(names, pushes, strict=True):
        run.staged[name] = [length * rng.standard_normal(8).astype(np.float32) for _ in NAMES]
    tokens = {name: push[0] for name, push in zip(names, pushes, strict=True)}
    run.train(*names)
    run.push_all(tokens, {name: push[1] for name, push in zip(names, pushes, strict=True)})
    assert run.last_apply is not None and [fold.push.cluster for fold in run.folds] == names
    ours = ReplicaMerges(rules({**EDIT, "merge": merge, "clip": CLIP if clipped else {}}), len(names), NAMES)
    intervals = [Interval(steps, tokens) for tokens, steps, _ in pushes]
    for layer in range(4):  # without the shared buffers, which a mesh has none of
        weighed = ours.weigh_layer(layer, [run.squares[name][layer] for name in names], intervals)
        theirs = [factor_at(fold.layer_weights or (fold.weight,), layer) for fold in run.folds]
        step = ours.step_layer(weighed, run.acc_sq[layer]) if ours.needs_norm(weighed) else ours.step_layer(weighed)
        scale = factor_at(run.last_apply.step.scales, layer)
        for w, of in zip(weighed.weights, theirs, strict=True):
            assert w * step.scales[0] == pytest.approx(of * scale, rel=1e-12)
        assert (step.numbers, step.lr) == (run.last_apply.step.numbers, run.last_apply.step.lr)


def test_softmax_is_the_papers_equation_2() -> None:
    """exp(−G) over their sum, in every layer for itself."""
    ours = ReplicaMerges(rules(EDIT), 3, ("a", "b"))
    merged = ours.weigh_layer(1, [1.0, 4.0, 0.25], [Interval(4, 9)] * 3)
    raised = np.exp([-1.0, -2.0, -0.5])
    shares = np.array(merged.weights) * ours.step_layer(merged).scales[0]
    assert shares == pytest.approx(raised / raised.sum(), rel=1e-12)


def test_a_clip_that_cannot_bind_needs_no_norm() -> None:
    """By the triangle inequality the sum is no longer than the weighted lengths; else its norm is measured."""
    ours = ReplicaMerges(rules(EDIT), 2, ("a",))
    short = ours.weigh_layer(0, [3.9, 3.9], [Interval(1, 1)] * 2)
    long = ours.weigh_layer(0, [100.0, 100.0], [Interval(1, 1)] * 2)
    assert not ours.needs_norm(short) and ours.needs_norm(long)
    near = ours.weigh_layer(0, [4.0, 4.0], [Interval(1, 1)] * 2)
    assert ours.needs_norm(near), "by rounding the sum may be above the limit that this bound is"
    assert ours.step_layer(long, 400.0).scales[0] == pytest.approx(0.5 * 2.0 / 10.0)
    assert ours.step_layer(long, 4.0).scales[0] == pytest.approx(0.5), "they point apart: it is short"


@pytest.mark.parametrize("square", [nan, inf, 1e61])
def test_what_is_not_finite_is_left_out(square: float) -> None:
    """Of one replica the others go on; of all the layer stays as it was, with its momentum."""
    ours = ReplicaMerges(rules({}), 2, ("a",))
    one = ours.weigh_layer(0, [square, 1.0], [Interval(1, 1)] * 2)
    assert one.weights == (0.0, 1.0) and one.shares[0] is None and ours.step_layer(one).scales == (1.0,)
    every = ours.weigh_layer(0, [square, square], [Interval(1, 1)] * 2)
    assert not every.has_any and not ours.needs_norm(every)
    stays = ours.step_layer(every)
    assert stays.scales == (0.0,) and stays.numbers == (1.0, 0.0, 0.0, 0.0)
    assert ours.step_layer(one, nan).scales == (0.0,)


def trained(merges: ReplicaMerges, syncs: int) -> None:
    for number in range(syncs):
        usual = [(1.0 + 0.01 * (number % 3)) ** 2] * 2
        merges.keep_statistics([merges.weigh_layer(0, usual, [Interval(1, 1)] * 2)])


def test_a_layer_out_of_line_is_left_out_after_the_warm_up() -> None:
    """z above β: one replica, or all; before, it counts; three times in a row, and its statistics begin anew."""
    ours = ReplicaMerges(rules(EDIT, "edit", warmup_rounds=3), 2, ("a",))
    trained(ours, 2)
    assert None not in ours.weigh_layer(0, [1e4, 1.0], [Interval(1, 1)] * 2).shares
    trained(ours, 1)
    assert None in ours.weigh_layer(0, [1e4, 1.0], [Interval(1, 1)] * 2).shares
    without = ReplicaMerges(rules(EDIT, warmup_rounds=3), 2, ("a",))
    trained(without, 6)
    assert None not in without.weigh_layer(0, [1e4, 1.0], [Interval(1, 1)] * 2).shares
    trained(ours, 3)
    for _ in range(3):
        spike = ours.weigh_layer(0, [1e4, 1.0], [Interval(1, 1)] * 2)
        assert [share is None for share in spike.shares] == [True, False]
        ours.keep_statistics([spike])
    assert ours.weigh_layer(0, [1e4, 1.0], [Interval(1, 1)] * 2).shares[0] is not None
    assert not ours.weigh_layer(0, [1e12, 1e12], [Interval(1, 1)] * 2).weights[1]


def test_statistics_come_back_by_layer_for_more_replicas() -> None:
    """A third replica, and a layer of another name, begin with none; the others are judged as before. Of three that
    were saved two are taken where there are two.
    """
    ours = ReplicaMerges(rules(EDIT, "edit", warmup_rounds=3), 2, ("a",))
    trained(ours, 6)
    more = ReplicaMerges(rules(EDIT, "edit", warmup_rounds=3), 3, ("new", "a"))
    more.load_json(ours.to_json())
    spike = more.weigh_layer(1, [1e4, 1.0, 1e4], [Interval(1, 1)] * 3)
    assert [share is None for share in spike.shares] == [True, False, False]
    assert more.weigh_layer(0, [1e4] * 3, [Interval(1, 1)] * 3).shares.count(None) == 0
    fewer = ReplicaMerges(rules(EDIT, "edit", warmup_rounds=3), 2, ("a",))
    fewer.load_json(more.to_json())
    assert [share is None for share in fewer.weigh_layer(0, [1e4, 1.0], [Interval(1, 1)] * 2).shares] == [True, False]


def test_replicas_that_report_no_tokens_count() -> None:
    """One token each, under rules that weigh by tokens: a script may leave them out."""
    ours = ReplicaMerges(rules({"weights": "tokens"}), 2, ("a",))
    assert ours.weigh_layer(0, [1.0, 1.0], [Interval(1, 0)] * 2).weights == (1.0, 1.0)


def test_unequal_steps_are_compared_per_step() -> None:
    """Four times the steps move twice as far, and are not out of line (A-EDiT)."""
    ours = ReplicaMerges(rules({**EDIT, "merge": "edit"}, "edit", warmup_rounds=3), 2, ("a",))
    trained(ours, 6)
    merged = ours.weigh_layer(0, [4.0, 1.0], [Interval(4, 1), Interval(1, 1)])
    assert merged.weights == (1.0, 1.0) and merged.scores == (1.0, 1.0)
    assert sqrt(4.0) / sqrt(4) == 1.0


@pytest.mark.parametrize(
    ("outer", "gates", "told"),
    [
        ({"clip": {"norm": 1.0}}, (), "outer.clip: expected none, or a norm with per_layer"),
        ({"clip": {"relative": 2.0}}, (), "outer.clip"),
        ({"merge": "rda"}, (), "outer.merge: rda is not made for a mesh"),
        ({}, ("edit", "replay"), "penalty.gates: expected edit or none, got replay"),
    ],
)
def test_rules_of_a_whole_model_are_refused(outer: dict[str, Any], gates: tuple[str, ...], told: str) -> None:
    """Layers are synchronised one by one: nothing is known of the whole model then."""
    with pytest.raises(ConfigError, match=told):
        ReplicaMerges(rules(outer, *gates), 2, ("a",))
