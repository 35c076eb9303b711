"""The interface between Di-PS and a framework that lays a model over ranks: how an adapter describes each parameter.

An adapter looks at the model on its own rank only, communicates with no other, and describes which rectangles of which
full parameter lie in which of its tensors. All that follows is common to all layouts: which rank moves what, what
travels inside the cluster, what is written when (plan.py, host.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.parameter import is_lazy

from dips.client.parallel.read_groups import INSTEAD, ReadGroup
from dips.client.parallel.rect import Rect
from dips.errors import ConfigError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what fp32 holds exactly


@dataclass(frozen=True, eq=False)
class TensorBlock:
    """A rectangle of a full parameter, and this rank's memory of it."""

    rect: Rect
    view: torch.Tensor  # [rect.rows, rect.cols]; shares memory with what the framework holds; any float type of FLOATS


@dataclass(frozen=True, eq=False)
class HeldParameter:
    """One parameter as this rank holds it."""

    name: str  # in the full model, whatever the layout
    shape: tuple[int, ...]  # of the full parameter
    reads: tuple[TensorBlock, ...]  # what a push takes: fp32 masters where the framework has them
    writes: tuple[TensorBlock, ...]  # what a pull fills: what the model computes with
    masters: tuple[TensorBlock, ...] = ()  # written after `reload_masters`, exactly; each lies within `writes`


class Adapter(ABC):
    """How one framework lays a model over ranks."""

    kind: ClassVar[str]  # for messages
    staged: bool = False  # ranks hold different parameters: pipeline stages

    @abstractmethod
    def held_parameters(self) -> list[HeldParameter]:
        """Describe every trainable parameter that lies on this rank; frozen ones take no part.

        Raise ConfigError naming the parameter and what would be supported.
        """

    @abstractmethod
    def local_tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name every parameter that lies on this rank, frozen ones too, with its object and this rank's memory now."""

    def local_masters(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Likewise the optimizer's masters that are known now, by the names of their parameters."""
        yield from ()

    def read_groups(self) -> list[ReadGroup]:
        """Which modules read which of these parameters, in the order of the forward as far as that is known.

        Raise ConfigError if that cannot be known, or if what is written just before a forward would not be read in it.
        """
        raise ConfigError(f"install: lazy is not supported for a {self.kind} model: {INSTEAD}")

    def reshard(self) -> None:
        """Have the framework drop gathered parameters: the next forward gathers the shards as they are by then."""

    @property
    def loses_bits(self) -> str:
        """The first parameter of 16 bits whose optimizer nothing is known of; "" if there is none."""
        return ""

    @property
    def remakes_masters(self) -> bool:
        """`reload_masters` makes masters of all parameters, also of those that were not written."""
        return False

    @property
    def hides_masters(self) -> bool:
        """The optimizer's masters are made by a function of the script: what they hold is not known here."""
        return False

    def reload_masters(self) -> None:
        """Have the framework make its masters from the parameters, which were written."""


def pair_blocks(name: str, memory: torch.Tensor, parts: list[Rect]) -> tuple[TensorBlock, ...]:
    """Pair rectangles with the contiguous memory in which they lie one behind the other."""
    if not memory.is_contiguous():
        raise ConfigError(
            f"{name}: its memory of shape {tuple(memory.shape)} is not contiguous: call .contiguous() on it"
        )
    flat, at, made = memory.detach().view(-1), 0, []
    for rect in parts:
        made.append(TensorBlock(rect, flat[at : at + rect.numel].view(rect.rows, rect.cols)))
        at += rect.numel
    assert at == flat.numel(), (name, at, flat.numel())
    return tuple(made)


NO_MEMORY = "has no memory yet: give the model its parameters (to_empty, init) before OuterLoop"


def check_made(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter whose shape is still to come."""
    if is_lazy(parameter):
        raise ConfigError(f"{name}: {NO_MEMORY}")


def check_in_memory(held: Iterable[HeldParameter]) -> None:
    """Refuse a model on torch's meta device: it can be described, and not be trained."""
    for parameter in held:
        if any(block.view.is_meta for block in parameter.writes):
            raise ConfigError(f"{parameter.name}: {NO_MEMORY}")


def check_plain(name: str, memory: torch.Tensor) -> None:
    """Refuse memory that cannot be copied like a plain tensor's."""
    if type(memory) is not torch.Tensor:
        raise ConfigError(
            f"{name}: a parameter held as {type(memory).__name__} cannot be copied exactly: keep it as a plain "
            "tensor of bf16 or fp32, and quantize it in the forward"
        )


def check_devices(held: Iterable[HeldParameter]) -> None:
    """Refuse a model that one process has spread over several devices."""
    first: dict[torch.device, str] = {}
    for h in held:
        for block in h.writes:
            first.setdefault(block.view.device, h.name)
    if len(first) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise ConfigError(
            f"one process holds the model on several devices ({places}; device_map?): start one process for each "
            "device, with fully_shard, tensor or pipeline parallelism"
        )


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse what fp32 does not hold exactly."""
    if dtype not in FLOATS:
        few = ", ".join(str(f) for f in FLOATS)
        raise ConfigError(f"{name}: expected a parameter of one of {few}, got {dtype}")
