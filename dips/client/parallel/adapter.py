"""The interface between Di-PS and a framework that lays a model over ranks: how an adapter describes each parameter,
the buffers that are shared beside them, and which forwards read which parameters.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dips.client.parallel.rect import Rect
from dips.errors import ConfigError, LocalProtocolError
from dips.protocol.grouping import is_shared_buffer
from dips.protocol.manifest import Manifest, unmatched_patterns

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# ---- torch types ----------------------------------------------------------------------------------------------------
# `torch.distributed.tensor` and `torch.distributed.fsdp` add seconds to a rank's start, and a plain model needs
# neither: as long as no other code has imported them, no object is of their types.


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    return _is_instance(tensor, "torch.distributed.tensor", "DTensor")


def is_fsdp(module: object) -> bool:
    """Return whether `fully_shard` wraps a module."""
    return _is_instance(module, "torch.distributed.fsdp", "FSDPModule")


def _is_instance(thing: object, module: str, name: str) -> bool:
    defined: Any = getattr(sys.modules.get(module), name, None)
    return defined is not None and isinstance(thing, defined)


# ---- shared buffers -------------------------------------------------------------------------------------------------
# Buffers that the clusters share beside the parameters, named by `shared.share_buffers` and held like parameters.
#
# Meant for state that no gradient changes and that the model computes with: the bias by which a router balances its
# experts (`*expert_bias*`), running means. It should be equal on all ranks that hold it; otherwise one rank's value is
# used for each part. The outer step averages it by tokens (outer/versions.py).


def choose_buffers(
    named: Iterable[tuple[str, torch.Tensor]], patterns: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a pattern names. Raises ConfigError for a buffer that cannot be averaged."""
    for name, buffer in named if patterns else ():
        if is_shared_buffer(name, patterns):
            if not buffer.dtype.is_floating_point:
                raise ConfigError(
                    f"share_buffers: {name} is a buffer of {buffer.dtype}, of which there is no mean: expected "
                    f"patterns that name buffers of float types alone, got {', '.join(patterns)}"
                )
            yield name, buffer


def check_parameter(name: str, patterns: Collection[str]) -> None:
    """Raise ConfigError for a trainable parameter that a pattern names: it would lose its learning rate and
    momentum.
    """
    if is_shared_buffer(name, patterns):
        raise ConfigError(
            f"share_buffers: {name} is a trainable parameter, which is shared anyway: expected patterns that name "
            f"buffers alone, got {', '.join(patterns)}"
        )


def check_found(manifest: Manifest, patterns: Collection[str]) -> None:
    """Raise ConfigError for a pattern that names no buffer of the whole model."""
    for pattern in unmatched_patterns(manifest, patterns):
        raise ConfigError(
            f"share_buffers: no buffer's name matches {pattern!r}; `model.named_buffers()` lists them, and the names "
            "are those of the whole model, without prefixes of wrappers"
        )


# ---- read groups ----------------------------------------------------------------------------------------------------
# Read groups: which modules' forwards read which parameters, so that `install: lazy` installs these before.
#
# A *read group* is read together: a module that `fully_shard` wraps (with others, if it wraps several as one), which
# gathers all its parameters in its own pre-forward; otherwise an entry of a ModuleList, Sequential or ModuleDict, the
# outermost one, with everything inside it; and the model itself, with the rest. A parameter is installed before the
# first call of any module of its group, so a module may read any parameter of its own group, whether or not the module
# that holds it is called. A parameter in two groups is installed before either.
#
# Inspects modules only: no copies, streams or ranks.


LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
INSTEAD = "use install: whole"


@dataclass(eq=False)
class ReadGroup:
    """Modules that read their parameters together."""

    modules: list[nn.Module] = field(default_factory=list)  # the first call of any of them reads the parameters
    reads: dict[str, nn.Parameter] = field(default_factory=dict)
    state: Any = None  # fully_shard's state; None: it does not wrap these modules


def find_read_groups(model: nn.Module, names: Mapping[nn.Parameter, str]) -> list[ReadGroup]:
    """Return the groups that hold any of the parameters in `names`, in the order in which modules were registered.

    Raises ConfigError if a module reads its parameters where no hook can run before it.
    """
    found: dict[Any, ReadGroup] = {}
    for module, key in _walk_modules(model, model, listed=False):
        _check_module(module)
        group = found.setdefault(key, ReadGroup())
        if is_fsdp(module):
            group.state = _fsdp_state(module)
        group.modules.append(module)
        group.reads |= {names[p]: p for p in module.parameters(recurse=False) if p in names}
    return [group for group in found.values() if group.reads]


def groups_gathered_with(group: ReadGroup, among: Mapping[Any, ReadGroup]) -> Iterator[ReadGroup]:
    """Yield the groups whose shards are gathered when this group's forward begins: itself, and those that it
    prefetches.

    among  groups by their state
    """
    yield group
    if group.state is not None:
        ahead = (among.get(state) for state in group.state._states_to_forward_prefetch)
        yield from (other for other in ahead if other is not None)


def check_sharded(group: ReadGroup) -> None:
    """Raise LocalProtocolError if the group's shards are already gathered: values installed now would not be read."""
    if group.state is None:
        return
    for sharded in fsdp_param_groups(group.state):
        if sharded._all_gather_result is not None or not sharded.is_sharded:
            raise LocalProtocolError(
                f"{sorted(group.reads)[0]}: gathered by FSDP before the forward of its module (by `unshard`?), and "
                f"before what was pulled is installed: {INSTEAD}"
            )


def _walk_modules(module: nn.Module, key: Any, *, listed: bool) -> Iterator[tuple[nn.Module, Any]]:
    """Yield every module with its group's key."""
    if is_fsdp(module):
        key, listed = _fsdp_state(module), True
    yield module, key
    for child in module.children():
        own = not listed and isinstance(module, LISTS)
        yield from _walk_modules(child, child if own else key, listed=listed or own)


def _check_module(module: nn.Module) -> None:
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"install: lazy cannot hook into a {kind}: {INSTEAD}")
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise ConfigError(f"install: lazy would break the compiled graph of a {kind} at its hooks: {INSTEAD}")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ConfigError(f"install: lazy supports DistributedDataParallel around the whole model only: {INSTEAD}")
    if is_fsdp(module) and not _is_known_state(_fsdp_state(module)):
        raise ConfigError(f"install: lazy does not support the {kind} of torch {torch.__version__}: {INSTEAD}")


def _fsdp_state(module: Any) -> Any:
    """Return the state that fully_shard keeps for a module; modules that it wraps as one share it."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]


def _is_known_state(state: Any) -> bool:
    """Return whether this version of torch has the private attributes of a wrapped module's state that are read
    here.
    """
    return hasattr(state, "_states_to_forward_prefetch") and all(
        hasattr(group, "_all_gather_result") and hasattr(group, "is_sharded") for group in fsdp_param_groups(state)
    )


def fsdp_param_groups(state: Any) -> list[Any]:
    """Return the groups of parameters that are gathered together; in older torch a state has one group or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]


# ---- seam -----------------------------------------------------------------------------------------------------------
# An adapter looks at the model on its own rank only, communicates with no other, and describes which rectangles of
# which full parameter are in which of its tensors. The rest is common to all layouts: which rank moves which pieces,
# which parts are exchanged inside the cluster, what is written when (plan.py, host.py).


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
        """Yield name, object and present local memory of every parameter on this rank, frozen ones too.

        Parameters that the framework has gathered are dropped: the next forward gathers the shards as they are then.
        """

    def local_masters(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, object and present local memory of the optimizer's known masters, by parameter name."""
        yield from ()

    def read_groups(self) -> list[ReadGroup]:
        """Return which modules read which of these parameters, in the order of the forward as far as it is known.

        Raises ConfigError if that is unknown, or if a forward would not read values written just before it.
        """
        raise ConfigError(f"install: lazy is not supported for a {self.kind} model: {INSTEAD}")

    @property
    def loses_bits(self) -> str:
        """The first 16-bit parameter whose optimizer is unknown; "" if there is none."""
        return ""

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
    for name, block in ((parameter.name, block) for parameter in held for block in parameter.writes):
        if block.view.is_meta:
            raise ConfigError(f"{name}: {NO_MEMORY}")


def check_copies(held: Iterable[HeldParameter]) -> None:
    """Raise ConfigError for two parameters of one name that begin with different values: they are no copies of a tied
    one, and the first would overwrite the other.
    """
    first: dict[str, HeldParameter] = {}
    for h in held:
        known = first.setdefault(h.name, h)
        pairs = zip(known.writes, h.writes, strict=False) if h.reads else ()
        alike = (pair for pair in pairs if pair[0].rect == pair[1].rect and pair[0].view.dtype is pair[1].view.dtype)
        if not all(torch.equal(a.view, b.view) for a, b in alike):
            raise ConfigError(
                f"{h.name}: two parts of the model have a parameter of this name, of different values: they count as "
                "one model, in which a tied parameter alone may be twice. Give its copies equal values, and put "
                "several models into an nn.ModuleDict"
            )


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
