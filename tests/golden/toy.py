"""A toy run, decided by the real Coordinator and computed by the real kernels: two clusters, one slave.

A cluster's "training" pulls its parameters towards a target of its own, with numbers made of integers alone, so that
no library's random numbers and no processor's vector units have a say in the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from dips.ids import GENESIS, PushId
from dips.outer import kernels
from dips.outer.kernel_pool import KernelPool
from dips.outer.versions import Versions
from dips.protocol import events as ev
from dips.protocol.effects import Apply, Commit, DropPush, Fold, Measure, OpenPush
from dips.protocol.enums import GateName, StepRule
from dips.protocol.options import Clip, DataOptions, Options, OuterOptions, PenaltyOptions, TimingOptions
from tests.loading import load_version
from tests.unit.protocol.scripted_run import MANIFEST, ScriptedRun

ROUNDS = 8
OPTIONS = Options(
    outer=OuterOptions(clip=Clip(relative=1.01), step=StepRule.NESTEROV),
    penalty=PenaltyOptions(gates=(GateName.DIPS,), warmup_rounds=2),
    data=DataOptions(ranges=40),
    timing=TimingOptions(window_s=10.0),
)


def numbers(seed: int) -> np.ndarray:
    """Multiples of 2⁻²⁰ in [−0.5, 0.5), one for each parameter."""
    mixed = (np.arange(MANIFEST.numel, dtype=np.uint64) + np.uint64(seed * 7919)) * np.uint64(2654435761)
    return ((mixed % np.uint64(1 << 20)).astype(np.float64) / (1 << 20) - 0.5).astype(np.float32)


class ToyRun(ScriptedRun):
    """A ScriptedRun whose slave has memory and kernels."""

    def __init__(self) -> None:
        self.memory = Versions(KernelPool(kernels), slots=4, pinned=1)
        self.memory.allocate_banks({0: MANIFEST.numel})
        load_version(self.memory, GENESIS, _initial)
        self.step_size = 0.125
        super().__init__(OPTIONS)

    def _answer(self, body: Any) -> Any:
        match body:
            case OpenPush():
                theta = self.memory.theta(self.memory.served_version)[0]  # type: ignore[arg-type]
                slot = self.memory.open_slot(body.push)[0]
                slot[:] = theta + np.float32(self.step_size) * (_target(body.push) - theta)
            case DropPush() if body.push in self.memory.open_pushes:
                self.memory.free_slot(body.push)
            case Measure():
                return ev.Measured(self.memory.measure_push(body.push).layer_sq, True)
            case Fold():
                return ev.Folded(self.memory.fold_push(body.push, body.weight, body.layer_weights))
            case Apply():
                self.memory.prepare_version(body.version, body.step)
            case Commit():
                self.memory.flip_version(body.version)
        return super()._answer(body)

    def play(self) -> ToyRun:
        """`a` pushes alone at times, one push of `b` is far too long and gated, and its cluster dies at the end."""
        self.train("a", "b")
        for number in range(ROUNDS):
            clusters = "a" if number % 3 == 2 else "ab"
            pushes = []
            for cluster in clusters:
                self.step_size = 64.0 if (number, cluster) == (4, "b") else 0.125 * (1 + number % 2 / 8)
                ranges = self.ask(ev.RangesRequested(0, cluster, 1, number + 1, 2)).ranges
                pushes.append(self.push(cluster, 100 + 50 * number + ord(cluster), 4, ranges))
            self.wait(11.0)
            for push in pushes:
                self.outcome(push)
        self.step(ev.ClusterSilent("b", 1, 10.0, 5000, 70))
        return self

    def digest(self, arrays: dict[int, np.ndarray]) -> str:
        return xxhash.xxh3_128_hexdigest(arrays[0].tobytes())


def _initial(theta: dict[int, np.ndarray], momentum: dict[int, np.ndarray]) -> None:
    theta[0][:] = numbers(0)
    momentum[0].fill(0.0)


def _target(push: PushId) -> np.ndarray:
    return numbers(push.seq * 2 + ord(push.cluster[0]))


def rounded(number: float) -> float:
    """To nine digits: sums of squares may be added in another order on another processor."""
    return float(f"{number:.9g}")


def played() -> ToyRun:
    return ToyRun().play()
