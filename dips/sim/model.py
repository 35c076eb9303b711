"""The model of a simulated world: its shapes, its initial values, and the effect of an inner step.

In the simulation a step adds random noise, which suffices for the invariants of θ. The emulator of `dips study` takes
real steps of real models instead (dips/study).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dips.ids import PushId
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.sim.scenario import Site
from dips.slave.ports import F32

NOISES = 32  # noise vectors, one of which an inner step adds
MOST_TOKENS = 5  # most tokens in an inner step


class SimModel(Protocol):
    """The model of a run, on every cluster."""

    manifest: Manifest
    genesis: dict[int, F32]  # θ of v0@r0, flat layers by number

    def draw_tokens(self, site: Site) -> int:
        """Return the tokens of a cluster's next inner step, if data ranges do not determine them."""

    def take_inner_step(self, site: Site, theta: dict[int, F32], progress: float) -> float:
        """Train on one batch, in place; `progress` of the run is 0 to 1. Return the loss before the step."""

    def on_install(self, site: Site, attempt: int, theta: dict[int, F32]) -> None:
        """Process the replacement of a cluster's `theta`; a new `attempt` has lost its optimizer's state."""

    def prepare_push(self, site: Site, push: PushId, theta: dict[int, F32]) -> dict[int, F32]:
        """Return the parameters that a cluster pushes: `theta`, or other arrays to simulate a fault."""


class NoiseModel:
    """Equal layers that move a little in each step, in one of a few directions."""

    def __init__(self, seed: int, layers: int, parameters: tuple[int, ...]) -> None:
        """Create the layers; `parameters` are the sizes of each layer's parameters."""
        self.manifest = Manifest(tuple(_make_layer(f"layers.{i}", parameters) for i in range(layers)))
        sizes = [layer.numel for layer in self.manifest.layers]
        rng = np.random.default_rng(seed)
        self.genesis: dict[int, F32] = {i: rng.standard_normal(n, dtype=np.float32) for i, n in enumerate(sizes)}
        self._noise = rng.standard_normal((NOISES, max(sizes)), dtype=np.float32) * np.float32(0.02)

    def draw_tokens(self, site: Site) -> int:
        return 1 + int(MOST_TOKENS * site.rng.random())

    def take_inner_step(self, site: Site, theta: dict[int, F32], progress: float) -> float:
        noise = self._noise[int(NOISES * site.rng.random())]
        for a in theta.values():
            a -= noise[: a.size]
        return 1.0

    def on_install(self, site: Site, attempt: int, theta: dict[int, F32]) -> None:
        pass  # noise has no state

    def prepare_push(self, site: Site, push: PushId, theta: dict[int, F32]) -> dict[int, F32]:
        return theta


def _make_layer(name: str, parameters: tuple[int, ...]) -> Layer:
    return Layer(name, tuple(Parameter(f"{name}.{k}", (numel,)) for k, numel in enumerate(parameters)))
