"""The interface between Di-PS and a framework that lays a model over ranks: how an adapter describes each parameter.

An adapter looks at the model on its own rank only, communicates with no other, and describes which rectangles of which
full parameter are in which of its tensors. The rest is common to all layouts: which rank moves which pieces, which
parts are exchanged inside the cluster, what is written when (plan.py, host.py).
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

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # types that fp32 represents exactly


@dataclass(frozen=True, eq=False)
class TensorBlock:
    """A rectangle of a full parameter, and this rank's memory of it."""

    rect: Rect
    view: torch.Tensor  # [rect.rows, rect.cols]; shares memory with the framework's tensor; any type of FLOATS


@dataclass(frozen=True, eq=False)
class HeldParameter:
    """One parameter as this rank holds it."""

    name: str  # in the full model, independent of the layout
    shape: tuple[int, ...]  # of the full parameter
    reads: tuple[TensorBlock, ...]  # read by a push: fp32 masters where the framework has them
    writes: tuple[TensorBlock, ...]  # written by a pull: the parameters that the model computes with
    masters: tuple[TensorBlock, ...] = ()  # written exactly, after `reload_masters`; each is a part of `writes`


class Adapter(ABC):
    """The layout of a model over ranks in one framework."""

    kind: ClassVar[str]  # name for messages
    staged: bool = False  # ranks hold different parameters, as pipeline stages do

    @abstractmethod
    def held_parameters(self) -> list[HeldParameter]:
        """Describe every trainable parameter that is on this rank; frozen ones take no part.

        Raises ConfigError naming the parameter and what would be supported.
        """

    @abstractmethod
    def local_tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, object and present local memory of every parameter on this rank, frozen ones too."""

    def local_masters(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, object and present local memory of the optimizer's known masters, by parameter name."""
        yield from ()

    def read_groups(self) -> list[ReadGroup]:
        """Return which modules read which of these parameters, in the order of the forward as far as it is known.

        Raises ConfigError if that is unknown, or if a forward would not read values written just before it.
        """
        raise ConfigError(f"install: lazy is not supported for a {self.kind} model: {INSTEAD}")

    def reshard(self) -> None:
        """Make the framework drop gathered parameters: the next forward gathers the shards as they are then."""

    @property
    def loses_bits(self) -> str:
        """The first 16-bit parameter whose optimizer is unknown; "" if there is none."""
        return ""

    @property
    def remakes_masters(self) -> bool:
        """Whether `reload_masters` remakes the masters of all parameters, also of those that were not written."""
        return False

    @property
    def hides_masters(self) -> bool:
        """Whether a function of the script makes the masters, so that their values are unknown here."""
        return False

    def reload_masters(self) -> None:
        """Make the framework derive its masters from the written parameters."""


def pair_blocks(name: str, memory: torch.Tensor, parts: list[Rect]) -> tuple[TensorBlock, ...]:
    """Pair rectangles with views of the contiguous memory that holds them one after the other."""
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
    """Raise ConfigError for a parameter whose shape is not known yet."""
    if is_lazy(parameter):
        raise ConfigError(f"{name}: {NO_MEMORY}")


def check_in_memory(held: Iterable[HeldParameter]) -> None:
    """Raise ConfigError for a model on torch's meta device, which can be described but not trained."""
    for parameter in held:
        if any(block.view.is_meta for block in parameter.writes):
            raise ConfigError(f"{parameter.name}: {NO_MEMORY}")


def check_plain(name: str, memory: torch.Tensor) -> None:
    """Raise ConfigError for memory that cannot be copied like a plain tensor."""
    if type(memory) is not torch.Tensor:
        raise ConfigError(
            f"{name}: a parameter held as {type(memory).__name__} cannot be copied exactly: keep it as a plain "
            "tensor of bf16 or fp32, and quantize it in the forward"
        )


def check_devices(held: Iterable[HeldParameter]) -> None:
    """Raise ConfigError for a model that one process has spread over several devices."""
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
    """Raise ConfigError for a type that fp32 does not represent exactly."""
    if dtype not in FLOATS:
        few = ", ".join(str(f) for f in FLOATS)
        raise ConfigError(f"{name}: expected a parameter of one of {few}, got {dtype}")
