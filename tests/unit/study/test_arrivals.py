"""The emulator fed with arrivals: the rounds that they say, and the bits of a loop that knows nothing of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xxhash

from dips.errors import ConfigError
from dips.ids import GENESIS, VersionId
from dips.outer import reference
from dips.outer_step import nesterov_numbers
from dips.protocol.enums import GateName, StepRule
from dips.protocol.options import Clip, Options, OuterOptions, PenaltyOptions
from dips.study.learner import Inner, LearnedModel, fill, flatten
from dips.study.task import BatchDraw, make_model
from tests.arrivals import Arrival, emulate_arrivals, read_arrivals
from tests.unit.study.tiny import TINY, TOKENS, build, fleet

SEED = 5
TASK, TWO = build(), fleet(1.0, 1.0)
LR, MOMENTUM = 0.7, 0.8
NESTEROV = OuterOptions(lr=LR, momentum=MOMENTUM, clip=Clip(), step=StepRule.NESTEROV)
OPTIONS = Options(outer=NESTEROV, penalty=PenaltyOptions(gates=()))
BASES = [GENESIS, *(VersionId(i, i) for i in range(1, 5))]


def push(cluster: str, steps: int, base: int) -> Arrival:
    return Arrival(cluster, steps * TOKENS, steps, BASES[base])


ROUNDS = [
    (push("b", 3, 0), push("a", 5, 0)),
    (push("a", 2, 1),),
    (push("a", 4, 2), push("b", 7, 1)),
    (push("b", 1, 3),),
]


def test_each_version_has_the_bits_of_a_plain_loop() -> None:
    """Pushes of unequal length, one of them from an older version, in rounds of one and two."""
    made = emulate_arrivals(TASK, TWO, TINY, ROUNDS, SEED, OPTIONS)
    assert read_arrivals([version.row for version in made]) == ROUNDS
    workers = {
        name: Inner(TASK, TINY, BatchDraw(SEED, i, 2), make_model(TASK, SEED)) for i, name in enumerate(TWO.names)
    }
    thetas = [flatten(workers["a"].parameters)]
    m = np.zeros_like(thetas[0])
    for pushes, version in zip(ROUNDS, made, strict=True):
        acc = np.zeros_like(m)
        for one in pushes:
            inner = workers[one.cluster]
            base = BASES.index(one.base)
            fill(inner.parameters, thetas[base])
            for _ in range(one.inner_steps):
                inner.take_step(base / len(ROUNDS))
            reference.fold(acc, thetas[-1], flatten(inner.parameters), np.float32(one.tokens / pushes[0].tokens))
        after, scale = np.empty_like(m), pushes[0].tokens / sum(one.tokens for one in pushes)
        reference.apply(thetas[-1], acc, m, scale, LR, nesterov_numbers(MOMENTUM), after)
        thetas.append(after)
        m = acc
        assert version.theta == _digest_layers(after), version.row.version
        assert version.momentum == _digest_layers(m), version.row.version


def test_the_order_of_arrivals_is_in_the_bits() -> None:
    """The same two pushes the other way round are another θ, by rounding."""
    made = [emulate_arrivals(TASK, TWO, TINY, [pushes], SEED, OPTIONS) for pushes in (ROUNDS[0], ROUNDS[0][::-1])]
    assert made[0][0].theta != made[1][0].theta


def test_what_cannot_have_been_is_said() -> None:
    """A base that the cluster cannot have had: it pulls what its last round has made."""
    with pytest.raises(ConfigError, match=r"v2@r2 was made of .* emulated, it is of"):
        emulate_arrivals(TASK, TWO, TINY, [ROUNDS[0], (push("a", 2, 0),)], SEED, OPTIONS)


def test_a_gated_push_takes_its_turn() -> None:
    """It is in no version, and its cluster pulls with the others; a ledger tells of it in outcomes only."""
    strict = PenaltyOptions(gates=(GateName.DIPS,), warmup_rounds=1)
    gated = Arrival("b", 64 * TOKENS, 64)
    rounds = [(push("a", 2, 0), push("b", 2, 0)), (push("a", 2, 1), gated), (push("b", 1, 2),)]
    made = emulate_arrivals(TASK, TWO, TINY, rounds, SEED, replace(OPTIONS, penalty=strict))
    assert [len(version.row.folds) for version in made] == [2, 1, 1]
    assert read_arrivals([version.row for version in made]) == rounds


def _digest_layers(flat: np.ndarray) -> tuple[str, ...]:
    """As the layers of the manifest hold it."""
    model = LearnedModel(TASK, TINY, SEED)
    layers = {i: np.empty_like(a) for i, a in model.genesis.items()}
    views, at = model.views(layers), 0
    for name in flatten_order():
        views[name][:] = flat[at : at + views[name].size]
        at += views[name].size
    return tuple(xxhash.xxh3_128_hexdigest(layers[i].tobytes()) for i in sorted(layers))


def flatten_order() -> list[str]:
    return [name for name, _ in make_model(TASK, SEED).named_parameters()]
