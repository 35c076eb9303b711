"""The emulator: real learning under the real Coordinator, and the same bits for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from dips.demo.model import Shape
from dips.protocol.options import Clip, OuterOptions
from dips.sim.site import Site
from dips.study.baselines import train_data_parallel, train_synchronous
from dips.study.emulator import Emulated, Fleet, emulate
from dips.study.learner import LearnedModel, Recipe

TINY = Recipe(lr=1e-2, batch=4, length=16, shape=Shape(width=16, layers=1, heads=2, hidden=24, context=32))
H = 4
TWO = Fleet(step_s=(1.0, 1.5), inner_steps=H)
TOKENS = 12 * H * TINY.tokens
FREE = OuterOptions(clip=Clip())


@pytest.fixture(name="made", scope="module")
def made_once() -> Emulated:
    return emulate(TWO, TINY, TOKENS, 3, FREE)


def test_it_trains_until_its_tokens_are_accepted(made: Emulated) -> None:
    assert made.tokens >= TOKENS and made.versions > 5
    assert sum(made.shares.values()) == made.tokens and set(made.shares) == {"a", "b"}
    assert all(made.steps[name] * TINY.tokens >= made.shares[name] for name in made.shares)
    assert 1.0 < made.effective_clusters <= 2.0 and made.shares["a"] > made.shares["b"]
    assert made.clipped == 0 and made.gated == 0
    assert len(made.staleness) * H * TINY.tokens == made.tokens


def test_it_learns(made: Emulated) -> None:
    model = LearnedModel(TINY, 3)
    assert made.loss < model.evaluate(model.genesis) - 0.5


def test_the_same_seed_gives_the_same_bits(made: Emulated) -> None:
    assert emulate(TWO, TINY, TOKENS, 3, FREE) == made
    assert emulate(TWO, TINY, TOKENS, 4, FREE).loss != made.loss


def test_the_paper_s_clip_is_counted() -> None:
    assert emulate(TWO, TINY, TOKENS, 3, OuterOptions(clip=Clip(norm=1e-3))).clipped > 5


def test_layers_hold_the_module_s_parameters() -> None:
    """What the slaves hold flat is what the module computes with."""
    model, site = LearnedModel(TINY, 3), Site("a", 1, 1.0, None)  # type: ignore[arg-type]
    theta = {layer: array.copy() for layer, array in model.genesis.items()}
    model.on_install(site, 1, theta)
    loss = model.take_inner_step(site, theta, 0.5)
    changed = [layer for layer in theta if not np.array_equal(theta[layer], model.genesis[layer])]
    assert sorted(changed) == sorted(theta) and abs(loss - np.log(256)) < 0.3


def test_the_baselines_learn_from_as_many_tokens() -> None:
    model = LearnedModel(TINY, 3)
    first = model.evaluate(model.genesis)
    for trained in (train_data_parallel(TINY, 2, TOKENS, 3), train_synchronous(TINY, 2, H, TOKENS, 3)):
        assert trained.tokens == TOKENS and trained.loss < first - 0.3
