"""The clusters of a study's run: their speed and pace, when they join and leave, and their faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from dips.errors import ConfigError
from dips.protocol.options import FORBID
from dips.sim.scenario import name_clusters
from dips.slave.ports import F32
from dips.study.task import Batch

# ---- faults ---------------------------------------------------------------------------------------------------------
# Faults of a study's clusters: bad data that a cluster pushes or trains on.
#
# A fault lasts from one share of the cluster's own inner steps to another, by default the middle third. emulator.py
# counts the gates' decisions on it.


Arrays = dict[int, F32]  # flat layers by number
LR_TIMES = 100.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a cluster, with its begin and end as shares of the inner steps that the cluster is due."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    kind: str
    begin: float = 1 / 3
    end: float = 2 / 3

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"fault: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 0.0 <= self.begin < self.end <= 1.0:
            raise ConfigError(f"fault {self.kind}: expected 0 ≤ begin < end ≤ 1, got {self.begin} and {self.end}")

    def holds(self, share: float) -> bool:
        """Return whether the fault is present when the cluster has taken this share of its steps."""
        return share >= self.begin and not self.is_over(share)

    def is_over(self, share: float) -> bool:
        """Return whether the fault has ended by then; one that ends at 1 does not, even if the run takes longer than
        due.
        """
        return self.end < 1.0 and share >= self.end

    def spoil_push(self, theta: Arrays, base: Arrays) -> Arrays:
        """Return the parameters to push instead of θ_j, which was trained from `base`."""
        return SPOILT_PUSHES.get(self.kind, _keep)(theta, base)

    def spoil_batch(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Return the batch to train on instead of this one."""
        if self.kind != "shuffled":
            return batch
        inputs, targets = batch
        order = torch.randperm(targets.numel(), generator=generator)
        return inputs, targets.reshape(-1)[order].view(targets.shape)

    @property
    def lr_times(self) -> float:
        """The factor by which the inner learning rate is wrong."""
        return LR_TIMES if self.kind == "lr_x100" else 1.0


def _keep(theta: Arrays, base: Arrays) -> Arrays:
    return theta


def _fill(value: float) -> Callable[[Arrays, Arrays], Arrays]:
    return lambda theta, base: {layer: np.full_like(a, value) for layer, a in theta.items()}


def _break_one(value: float) -> Callable[[Arrays, Arrays], Arrays]:
    """Return a function that replaces one number in each layer, as a broken unit would."""

    def spoil(theta: Arrays, base: Arrays) -> Arrays:
        spoilt = {layer: a.copy() for layer, a in theta.items()}
        for a in spoilt.values():
            a[0] = value
        return spoilt

    return spoil


def _flip(theta: Arrays, base: Arrays) -> Arrays:
    return {layer: 2 * base[layer] - a for layer, a in theta.items()}


def _freeze(theta: Arrays, base: Arrays) -> Arrays:
    return {layer: a.copy() for layer, a in base.items()}


SPOILT_PUSHES: Mapping[str, Callable[[Arrays, Arrays], Arrays]] = {
    "nan": _break_one(float("nan")),
    "inf": _break_one(float("inf")),
    "zeros": _fill(0.0),
    "frozen": _freeze,  # pushes the pulled parameters
    "sign": _flip,  # θ_j mirrored at its base
}
KINDS = (*SPOILT_PUSHES, "lr_x100", "shuffled")


# ---- fleet ----------------------------------------------------------------------------------------------------------


PACES = ("steps", "aligned")
LINK_S = 0.45  # mean duration of a simulated transfer on a link of slowness 1


def _require(holds: bool, key: str, expected: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"{key}: expected {expected}, got {got!r}")


@dataclass(frozen=True, slots=True)
class FleetCluster:
    """One cluster; seconds are in virtual time, shares of the run's tokens."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    step_s: float = 1.0  # of an inner step
    jitter: float = 0.1  # of step_s, between the shortest and the longest
    straggles: float = 0.0  # share of inner steps that take ten times as long
    link_s: float = LINK_S  # of a push, and of a pull
    joins: float = 0.0  # share of the run at which it joins
    leaves: float = 1.0  # share at which it leaves; 1: never
    returns: float = 1.0  # share at which it returns after leaving; 1: never
    fails: float = 1.0  # share at which its processes are killed, and later restarted; 1: never
    down_s: float = 30.0  # time until they are restarted
    fault: Fault | None = None

    def __post_init__(self) -> None:
        for key in ("step_s", "link_s", "down_s"):
            _require(getattr(self, key) > 0, f"clusters: {key}", "a number above 0", getattr(self, key))
        _require(0 <= self.jitter < 2, "clusters: jitter", "a number in [0, 2)", self.jitter)
        for key in ("straggles", "joins", "leaves", "returns", "fails"):
            _require(0 <= getattr(self, key) <= 1, f"clusters: {key}", "a share, 0 to 1", getattr(self, key))
        _require(self.joins < self.leaves, "clusters: leaves", "a share above joins", self.leaves)
        back = self.returns == 1.0 or self.leaves < self.returns
        _require(back, "clusters: returns", "a share above leaves, or 1", self.returns)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The clusters of a run, with the options of their cluster files."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    members: tuple[FleetCluster, ...] = (FleetCluster(),) * 4
    inner_steps: int = 32
    pace: str = "steps"
    overlap: bool = False
    fragments: int = 1

    def __post_init__(self) -> None:
        _require(len(self.members) >= 1, "clusters", "at least one", len(self.members))
        _require(self.inner_steps >= 1, "inner_steps", "a whole number, at least 1", self.inner_steps)
        _require(self.pace in PACES, "pace", " or ".join(PACES), self.pace)
        _require(self.fragments >= 1, "fragments", "a whole number, at least 1", self.fragments)
        _require(self.overlap or self.fragments == 1, "fragments", "1 without overlap", self.fragments)
        _require(any(m.joins == 0.0 for m in self.members), "clusters: joins", "0 for one at least", "none")

    @property
    def names(self) -> tuple[str, ...]:
        return name_clusters(len(self.members))

    @property
    def step_rate(self) -> float:
        """The ideal rate: inner steps of all clusters per second of virtual time, while all are present."""
        return sum(1.0 / member.step_s for member in self.members)

    def due_steps(self, steps: float) -> dict[str, float]:
        """Return how many of a run's inner steps each cluster is due by its speed."""
        rate = self.step_rate
        return {name: steps / (member.step_s * rate) for name, member in zip(self.names, self.members, strict=True)}
