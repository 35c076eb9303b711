"""Bytes that a rank's device holds, by category, and devices that are emulated.

The account is counted from the tensors themselves after each action: parameters and shards, what FSDP2 has gathered and
its buffers, gradients, the optimizer's state. What autograd keeps of a micro-batch is measured in the first forward
of each part, with the storages that the tensors share counted once, and then known by the number of micro-batches held.
The categories are those of the plan, which the simulator counts (dips/inside/planning/simulate.py), so that one can be
held against the other. Two more are in host memory: tensors that go over borders, and what `offload` has put there.

Known limits: what an action allocates and frees again is not in the account: the plan's workspace, and the second copy
of one layer while a gathered ministage is taken out of its buffers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any

import torch

from dips.client.parallel.devices import Device
from dips.errors import ConfigError
from dips.inside.planning.profile import GB, GBIT_BYTES
from dips.inside.planning.simulate import MemoryCategory


class HostCategory(StrEnum):
    """Uses of host memory by a rank, beside its device's."""

    BORDERS = "borders"  # received and not yet used, and sent in this step
    OFFLOADED = "offloaded"


Category = MemoryCategory | HostCategory
COUNTED: tuple[Category, ...] = (*(of for of in MemoryCategory if of is not MemoryCategory.WORKSPACE), *HostCategory)


class OutOfDeviceMemory(ConfigError):
    """A device would hold more than it can."""


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """A device that this rank's own stands for, by the names of profile.yaml.

    speed      of its computation, as a share of the own device's: the rest of the time is slept
    memory_gb  that the account may come to; beyond it `OutOfDeviceMemory` is raised
    copy_gbit  between device and host memory, one copy at a time each way: what is fetched is waited for until then
    """

    speed: float = 1.0
    memory_gb: float = inf
    copy_gbit: float = inf

    def check(self) -> None:
        """Raise ConfigError for a device that there cannot be."""
        if not (0 < self.speed <= 1 and self.memory_gb > 0 and self.copy_gbit > 0):
            raise ConfigError(f"emulate: expected a speed above 0, up to 1, memory and rate above 0, got {self}")

    @property
    def memory_bytes(self) -> float:
        """Bytes of its memory."""
        return self.memory_gb * GB

    @property
    def copy_byte_s(self) -> float:
        """Seconds that a byte takes between device and host memory."""
        return 1 / (self.copy_gbit * GBIT_BYTES)

    @contextmanager
    def stretched(self, device: Device) -> Iterator[None]:
        """Sleep after a computation for as long as the slower device would still compute."""
        if self.speed == 1.0:
            yield
            return
        began_s = time.monotonic()
        yield
        device.finish_work()
        time.sleep((time.monotonic() - began_s) * (1 / self.speed - 1))


class MemoryAccount:
    """Bytes by category, and the most there were since the step began."""

    def __init__(self, device: str, limit_bytes: float = inf) -> None:
        """Open the account of a device.

        device       its name in the plan
        limit_bytes  that all categories of the device together may come to
        """
        self._device, self._limit_bytes = device, limit_bytes
        self._rows: dict[tuple[Category, Any], int] = {}
        self._held: dict[Category, int] = dict.fromkeys(COUNTED, 0)
        self._device_bytes = 0
        self.peaks: dict[Category, int] = dict(self._held)
        """The most bytes of each category in the last step, whenever that was."""
        self.peak_bytes = 0
        """The most bytes of the device in the last step, all its categories together."""

    @property
    def held(self) -> dict[Category, int]:
        """Bytes of each category now."""
        return dict(self._held)

    def begin_step(self) -> None:
        """Forget the peaks of the step before."""
        self.peaks, self.peak_bytes = dict(self._held), self._device_bytes

    def hold(self, category: Category, owner: Any, nbytes: int) -> None:
        """Enter the bytes that an owner, as a part of the model, now holds in a category.

        Raises OutOfDeviceMemory if the device then holds more than its limit.
        """
        change = nbytes - self._rows.get((category, owner), 0)
        if not change:
            return
        if nbytes:
            self._rows[category, owner] = nbytes
        else:
            del self._rows[category, owner]
        self._held[category] += change
        self.peaks[category] = max(self.peaks[category], self._held[category])
        if isinstance(category, HostCategory):
            return
        left = self._limit_bytes - self._device_bytes
        self._device_bytes += change
        self.peak_bytes = max(self.peak_bytes, self._device_bytes)
        if change > left:
            raise OutOfDeviceMemory(
                f"{self._device}: out of memory: {category} want {change} bytes, {max(0, round(left))} of "
                f"{self._limit_bytes:.0f} are left. Plan for a device of this size, with more ministages or `offload`"
            )

    def drop(self, category: Category) -> None:
        """Enter that nothing of a category is held."""
        for row, owner in [key for key in self._rows if key[0] is category]:
            self.hold(row, owner, 0)


class SavedBytes:
    """The bytes of tensors that a computation keeps, each storage once."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        """Begin to count; `known` are counted elsewhere, as parameters."""
        self._known = {_address(tensor) for tensor in known}
        self._found: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(self._found.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what autograd keeps of the computation of this block for its backward."""
        with torch.autograd.graph.saved_tensors_hooks(self._take, lambda tensor: tensor):
            yield

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is kept besides."""
        if (address := _address(tensor)) not in self._known:
            self._found[address] = tensor.untyped_storage().nbytes()

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        self.add(tensor)
        return tensor


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
