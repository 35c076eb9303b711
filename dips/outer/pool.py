"""The memory of a slave as a written sum: equal banks of fp32, allocated and touched at start, one holder each.

A bank holds one float for every parameter of the slave's layers: θ is a bank, m is one, each slot is one. Banks carry
no role of their own; roles move between them, so that the first push of a round becomes acc, and acc becomes m′,
without a copy. This module does not know what a version is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import ceil
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from dips.dataclass import dataclass
from dips.errors import Busy, ConfigError, LocalProtocolError

F32 = npt.NDArray[np.float32]
Arrays = Mapping[int, F32]  # layer index in the manifest → the layer's flat parameters

BYTES = 4  # of an fp32 parameter
FIXED_BANKS = 4  # θ, m, acc (later m′), θ′
PROCESS_BYTES = 210_000_000  # Python, NumPy, numba, libzmq, gRPC and the HTTP port, measured at work
WRITER_BYTES = 8 << 20  # the snapshot writer's buffer
_HOLDER = attrgetter("holder")
_ALIGN = 16  # floats: a layer begins on a cache line


@dataclass(frozen=True, slots=True)
class MemorySum:
    """The memory of a slave in bytes, counted before any of it is allocated."""

    numel: int  # parameters of this slave's layers
    slots: int
    pinned: int
    transit_bytes: int
    update_bytes: float = 0.0  # of all updates, a parameter (updates.py)

    @property
    def per_parameter(self) -> float:
        banks = BYTES * (FIXED_BANKS + self.slots + self.pinned)
        return banks + self.update_bytes if self.update_bytes else banks

    @property
    def pool_bytes(self) -> int:
        return ceil(self.numel * self.per_parameter)

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + self.transit_bytes + WRITER_BYTES + PROCESS_BYTES

    def describe_sum(self) -> str:
        """Write the sum as a person checks it."""
        updates = f" + {self.update_bytes:.3g} of updates" if self.update_bytes else ""
        return (
            f"{self.numel:,} parameters x (16 + 4 x {self.slots} slots + 4 x {self.pinned} pinned{updates}) = "
            f"{self.numel:,} x {self.per_parameter:.4g} B = {_format_size(self.pool_bytes)} pool"
            f" + {_format_size(self.transit_bytes)} transit + {_format_size(WRITER_BYTES)} snapshot writer"
            f" + {_format_size(PROCESS_BYTES)} process = {_format_size(self.total_bytes)}"
        )

    def require_memory(self, available: int) -> None:
        """Raise ConfigError, with the sum, if the machine has less than `available` bytes for it."""
        if self.total_bytes > available:
            raise ConfigError(
                f"slots, pinned: this slave needs {self.describe_sum()}, and it may have"
                f" {_format_size(available)}: give it fewer layers, fewer slots or more memory"
            )


def _format_size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"


@dataclass(eq=False, slots=True)
class Bank:
    """One float for every parameter; `holder` says who may write it, None if it is free."""

    number: int
    arrays: dict[int, F32]
    holder: str | None = field(default=None)


class Pool:
    """All banks of a slave; `layers` gives the parameters of each layer, by its index in the manifest."""

    def __init__(self, layers: Mapping[int, int], banks: int) -> None:
        padded = {layer: -(-numel // _ALIGN) * _ALIGN for layer, numel in layers.items()}
        self.banks = tuple(Bank(i, _carve_layers(layers, padded)) for i in range(banks))
        self.bank_bytes = BYTES * sum(layers.values())
        self._used = 0  # banks with a holder

    @property
    def used_bytes(self) -> int:
        return self.bank_bytes * self._used

    @property
    def limit_bytes(self) -> int:
        return self.bank_bytes * len(self.banks)

    def take_bank(self, holder: str) -> Bank:
        """Give a free bank to `holder`; raise Busy, naming all holders, if there is none."""
        return self.take_all(holder)[0]

    def take_all(self, *holders: str) -> list[Bank]:
        """Give each of `holders` a free bank, or raise Busy, naming who holds them, and give none."""
        free = [bank for bank in self.banks if bank.holder is None]
        if len(free) < len(holders):
            raise Busy(
                f"{' and '.join(holders)}: {len(free)} of {len(self.banks)} banks are free;"
                f" held by {', '.join(self.bank_holders())}"
            )
        for bank, holder in zip(free, holders, strict=False):
            bank.holder = holder
        self._used += len(holders)
        return free[: len(holders)]

    def give_back(self, bank: Bank) -> None:
        """Make a bank free; its holder must be done with it, and so must everybody who reads it."""
        if bank.holder is None:
            raise LocalProtocolError(f"bank {bank.number} was given back twice")
        bank.holder = None
        self._used -= 1

    def bank_holders(self) -> list[str]:
        """Who holds the banks that are not free, in order of the banks."""
        return [*filter(None, map(_HOLDER, self.banks))]


def _carve_layers(layers: Mapping[int, int], padded: Mapping[int, int]) -> dict[int, F32]:
    """Cut one touched allocation into layers; touched, or the machine runs out of memory in the middle of a run."""
    flat = np.full(sum(padded.values()), 0.0, np.float32)
    arrays, at = {}, 0
    for layer, numel in layers.items():
        arrays[layer] = flat[at : at + numel]
        at += padded[layer]
    return arrays
