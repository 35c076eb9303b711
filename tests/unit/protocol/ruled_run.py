"""A ScriptedRun of several layers whose slave has memory and kernels: rules from the options to the bits of θ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dips.ids import GENESIS, PushId
from dips.outer import reference
from dips.outer.kernel_pool import KernelPool
from dips.outer.versions import Versions
from dips.protocol import events as ev
from dips.protocol.effects import Apply, Commit, DropPush, Fold, Measure, OpenPush
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import Manifest
from dips.protocol.options import Clip, Options, OuterOptions, PenaltyOptions, TimingOptions
from tests import rules_reference
from tests.loading import load_version
from tests.unit.protocol.scripted_run import ScriptedRun

NAMES = ("embedding.weight", "layers.0.w", "layers.1.w", "output.weight", "router.bias")
RULED = Manifest.from_shapes([(name, (8,)) for name in NAMES], Grouping(share_buffers=("router.*",)))
BLOCKS, BUFFERS = (1, 2), 4  # by the names' order: embedding, layers.0, layers.1, output, buffers
START = 1.0

Difference = list[np.ndarray]  # θ − θ_j of each layer


class RuledRun(ScriptedRun):
    """`push_all` stages differences and has them folded in one round."""

    def __init__(self, outer: OuterOptions, pinned: int = 1, **more: Any) -> None:
        self.memory = Versions(KernelPool(reference), 4, pinned)
        self.memory.allocate_banks({i: layer.numel for i, layer in enumerate(RULED.layers)}, None, frozenset({BUFFERS}))
        load_version(self.memory, GENESIS, _initial)
        self.staged: dict[str, Difference] = {}  # of a cluster's next push
        options = Options(outer=outer, penalty=PenaltyOptions(gates=()), timing=TimingOptions(window_s=10.0))
        super().__init__(options, manifest=RULED, **more)

    def _answer(self, body: Any) -> Any:
        match body:
            case OpenPush():
                theta = self.memory.theta(self.memory.served_version)  # type: ignore[arg-type]
                for layer, slot in self.memory.open_slot(body.push).items():
                    slot[:] = theta[layer] - self.staged[body.push.cluster][layer]
            case DropPush() if body.push in self.memory.open_pushes:
                self.memory.free_slot(body.push)
            case Measure():
                found = self.memory.measure_push(body.push)
                return ev.Measured(found.layer_sq, True, found.layer_dot, found.digest)
            case Fold():
                return ev.Folded(self.memory.fold_push(body.push, body.weight, body.layer_weights))
            case Apply():
                self.memory.prepare_version(body.version, body.step)
            case Commit():
                self.memory.flip_version(body.version)
        return super()._answer(body)

    def push_all(self, tokens: dict[str, int], steps: dict[str, int] | None = None) -> list[PushId]:
        """One round with a push of each cluster that is named, in this order."""
        pushes = [self.push(cluster, n, (steps or {}).get(cluster, 4)) for cluster, n in tokens.items()]
        self.wait(11.0)
        for push in pushes:
            self.outcome(push)
        return pushes

    @property
    def theta(self) -> list[np.ndarray]:
        arrays = self.memory.theta(self.memory.served_version)  # type: ignore[arg-type]
        return [arrays[layer].copy() for layer in sorted(arrays)]


def _initial(theta: dict[int, np.ndarray], momentum: dict[int, np.ndarray]) -> None:
    for layer in theta:
        theta[layer].fill(START)
        momentum[layer].fill(0.0)


def draw_difference(seed: int, size: float = 0.1) -> Difference:
    rng = np.random.default_rng(seed)
    return [size * (i + 1) * rng.standard_normal(8).astype(np.float32) for i in range(len(NAMES))]


def pushed(difference: Difference, tokens: int, steps: int = 4) -> rules_reference.Pushed:
    """The same as the reference takes it, without buffers."""
    layers = [d.astype(np.float64).tolist() for d in difference[:BUFFERS]]
    return rules_reference.Pushed(tokens, steps, layers)


PLAIN = {"clip": Clip(), "step": "nesterov"}
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
