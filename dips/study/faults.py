"""Faults of a study's clusters: bad data that a cluster pushes or trains on.

A fault lasts from one share of the cluster's own inner steps to another, by default the middle third. account.py counts
the gates' decisions on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from dips.errors import ConfigError
from dips.protocol.options import FORBID
from dips.slave.ports import F32
from dips.study.task import Batch

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
