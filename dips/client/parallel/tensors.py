"""The adapter for torch's layouts: plain, DDP, FSDP2 and HSDP (`fully_shard`), tensor parallel, and mixes by DTensor.

A DTensor has the place of its local tensor, on a mesh of any dims, in uneven shards too; any other parameter is
whole on this rank. On TP × FSDP the parameters without a TP plan are on the dp sub-mesh: every TP
rank holds a replica of their shards.

A push reads the parameters themselves: with FSDP2's mixed precision or autocast these are fp32 and exact. If they are
bf16 or fp16, it reads the fp32 masters of the optimizer that the script has passed; where there are
none, the rounding error of a pull is kept for the next push (host.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from dips.client.parallel.adapter import (
    INSTEAD,
    Adapter,
    HeldParameter,
    ReadGroup,
    check_devices,
    check_dtype,
    check_made,
    check_parameter,
    check_plain,
    choose_buffers,
    find_read_groups,
    is_dtensor,
    is_fsdp,
    pair_blocks,
)
from dips.client.parallel.rect import Rect, box_rects
from dips.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# (mesh, placements, shape) → local shape and its rectangles; cached, since torch takes 20 µs to compute them.
Places = dict[tuple[Any, ...], tuple[tuple[int, ...], list[Rect]]]

# Names that wrappers insert into a parameter's path.
NAMES = 1 << 17  # names cached: those of a model with many experts are needed several times per round
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


# ---- masters ---------------------------------------------------------------------------------------------------------
#     state[p]["master_param"] and the like      Transformer Engine's and other FusedAdam, torch's foreach optimizers
#     param_groups_master                        apex's FusedAdam(master_weights=True)
#     param_d2h_map                              torchao's CPUOffloadOptimizer
#     param_groups of fp32 copies                loops that keep them by hand, in the order of the model's parameters
#
# They are looked up again whenever the model is read or written: most are made at the first step. For any other
# optimizer the script passes a function instead, which is called after every install and makes masters from parameters.


NOT_FP32 = (
    "{kind} keeps its masters as {dtype}: expected torch.float32 (Transformer Engine's FusedAdam: "
    "master_weight_dtype=torch.float32, store_param_remainders=False)"
)
STATE_KEYS = ("master_param", "master_params", "master_weight", "master_weights", "main_param", "fp32_param")


class OptimizerMasters:
    """The masters of one optimizer for the parameters of one model."""

    def __init__(self, given: Any) -> None:
        """Accept an optimizer, a wrapper of one, a function to be called after installs, or None."""
        self._sync: Callable[[], Any] | None = given if callable(given) and not hasattr(given, "step") else None
        self._optimizers = () if self._sync is not None else tuple(unwrap_optimizers(given))
        if given is not None and self._sync is None and not self._optimizers:
            raise ConfigError(
                f"optimizer: expected a torch optimizer, one that wraps it, or a function that makes masters from "
                f"parameters, got {type(given).__name__}"
            )

    @property
    def has_function(self) -> bool:
        """Whether the script's function makes the masters, which are unknown here."""
        return self._sync is not None

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer was given, in which masters may be found."""
        return bool(self._optimizers)

    @property
    def known(self) -> bool:
        """Whether pulls reach the masters: an optimizer or a function was given."""
        return self._sync is not None or bool(self._optimizers)

    def find_masters(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Return the masters of those parameters that have one."""
        found: dict[nn.Parameter, torch.Tensor] = {}
        wanted = {id(p): p for p in parameters if p.dtype is not torch.float32 or self._by_map(p) is not None}
        for optimizer in self._optimizers:
            for parameter, master in (*_from_state(optimizer), *_from_groups(optimizer)):
                if id(parameter) in wanted:
                    if master.dtype not in (torch.float32, parameter.dtype):  # scaled, or bits that the parameter lacks
                        raise ConfigError(NOT_FP32.format(kind=type(optimizer).__name__, dtype=master.dtype))
                    found[parameter] = master
        for parameter in wanted.values():
            if (copy := self._by_map(parameter)) is not None:
                found[parameter] = copy
        if self._optimizers and wanted and not found:
            found |= self._by_order(list(parameters))
        return found

    def call_sync(self) -> None:
        """Call the script's function after parameters were written."""
        if self._sync is not None:
            self._sync()

    def _by_map(self, parameter: nn.Parameter) -> torch.Tensor | None:
        maps = (getattr(optimizer, "param_d2h_map", {}) for optimizer in self._optimizers)
        return next((found[parameter] for found in maps if parameter in found), None)

    def _by_order(self, parameters: list[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Match the parameters with the tensors of an optimizer that steps copies of them, in their order."""
        stepped = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
        ours = {id(p) for p in parameters}
        if any(id(p) in ours for p in stepped):
            return {}
        alike = len(stepped) == len(parameters) and all(
            p.shape == q.shape and q.dtype is torch.float32 for p, q in zip(parameters, stepped, strict=True)
        )
        if not alike:
            raise ConfigError(
                f"the optimizer steps {len(stepped)} tensors that are neither the model's {len(parameters)} parameters "
                "nor their fp32 copies in the same order: give a function instead that makes them from the "
                "parameters, OuterLoop(model, optimizer=function)"
            )
        return dict(zip(parameters, stepped, strict=True))


def unwrap_optimizers(given: Any) -> Iterator[Optimizer]:
    """Yield the torch optimizers that step inside a wrapper of accelerate, Megatron-core, DeepSpeed or apex.

    accelerate's wrapper inherits from Optimizer, and torch's hooks are called with the wrapped optimizer.
    """
    for one in getattr(given, "chained_optimizers", None) or [given]:
        seen = set[int]()
        while (inner := getattr(one, "optimizer", None)) is not None and id(one) not in seen:
            if isinstance(one, Optimizer) and not isinstance(inner, Optimizer):
                break  # the attribute means something else in this class
            seen.add(id(one))
            one = inner
        if isinstance(one, Optimizer):
            yield one


def _from_state(optimizer: Optimizer) -> Iterator[tuple[Any, torch.Tensor]]:
    for parameter, state in getattr(optimizer, "state", {}).items():  # torchao's for offloading has none
        if isinstance(state, dict):
            masters = (state.get(key) for key in STATE_KEYS)
            yield from ((parameter, m) for m in masters if isinstance(m, torch.Tensor) and m.shape == parameter.shape)


def _from_groups(optimizer: Optimizer) -> Iterator[tuple[Any, torch.Tensor]]:
    held = getattr(optimizer, "param_groups_master", None) or ()
    for group, masters in zip(optimizer.param_groups, held, strict=False):
        yield from zip(group["params"], masters["params"], strict=True)


class TorchAdapter(Adapter):
    """The adapter for parameters that are tensors or DTensors."""

    kind = "plain, DDP, FSDP2, HSDP or tensor-parallel"

    def __init__(
        self, parts: Sequence[nn.Module], staged: bool, optimizer: Any = None, share_buffers: Collection[str] = ()
    ) -> None:
        """Unwrap the model's parts.

        staged         the ranks hold different parts, under the names of the whole model (torch's pipelining)
        optimizer      may keep fp32 masters; or a function that makes them from the parameters; None: unknown
        share_buffers  patterns of the names of buffers that are held like parameters
        """
        self._wrapped, self._parts, self.staged = parts, [unwrap_module(part) for part in parts], staged
        self._optimizer, self._share_buffers = OptimizerMasters(optimizer), share_buffers
        named = (one for part in self._parts for one in _name_parameters(part))
        self._trained = {name for name, parameter in named if parameter.requires_grad}  # also if it is frozen later

    def held_parameters(self) -> list[HeldParameter]:
        self._reshard()  # otherwise parameters of a module that was only evaluated are still gathered
        named = list(self._trainable_parameters())
        masters = self._optimizer.find_masters([parameter for _, parameter in named])
        places: Places = {}
        copies = {id(p) for part in self._parts for name, p in _name_parameters(part, own=True) if name in _ties(part)}
        held = [
            _describe_parameter(name, parameter, masters.get(parameter), places, id(parameter) not in copies)
            for name, parameter in named
        ]
        held += [_describe_parameter(name, buffer, None, places) for name, buffer in self._chosen_buffers()]
        check_devices(held)
        return held

    def local_tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        self._reshard()
        for part in self._parts:
            for name, parameter in _name_parameters(part):
                yield name, parameter, _local_tensor(parameter)
        yield from ((name, buffer, _local_tensor(buffer)) for name, buffer in self._chosen_buffers())

    def local_masters(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        if not self._optimizer.has_optimizer:
            return
        self._reshard()
        named = list(self._trainable_parameters())
        masters = self._optimizer.find_masters([parameter for _, parameter in named])
        yield from ((name, masters[p], _local_tensor(masters[p])) for name, p in named if p in masters)

    @property
    def hides_masters(self) -> bool:
        return self._optimizer.has_function

    def reload_masters(self) -> None:
        self._optimizer.call_sync()

    @property
    def loses_bits(self) -> str:
        """The first trainable 16-bit parameter whose optimizer is unknown; "" if there is none."""
        coarse = (name for name, p in self._trainable_parameters() if p.dtype is not torch.float32)
        return "" if self._optimizer.known else next(coarse, "")

    def _reshard(self) -> None:
        """Reshard FSDP2's modules: after a forward without a backward the root keeps gathered parameters and would
        reuse them.
        """
        for part in self._parts:
            for module in part.modules():
                if is_fsdp(module):
                    cast(Any, module).reshard()

    def read_groups(self) -> list[ReadGroup]:
        if self._share_buffers:
            raise ConfigError(f"install: lazy does not write shared.share_buffers: {INSTEAD}")
        if self.staged:
            raise ConfigError(f"install: lazy is not supported for a model given in parts: {INSTEAD}")
        parameters = [parameter for _, parameter in self._trainable_parameters()]
        coarse = self._optimizer.known and any(p.dtype is not torch.float32 for p in parameters)
        if coarse or self._optimizer.find_masters(parameters):
            raise ConfigError(f"install: lazy does not write an optimizer's fp32 masters: {INSTEAD}")
        (wrapped,), (model,) = self._wrapped, self._parts
        if kind := next((type(m).__name__ for m in wrapped.modules() if _compiled_module(m) is not None), ""):
            raise ConfigError(f"install: lazy would break the compiled graph of a {kind} at its hooks: {INSTEAD}")
        if getattr(wrapped, "mixed_precision", None) is not None:
            raise ConfigError(
                f"install: lazy: DistributedDataParallel(mixed_precision=…) reads all parameters at once: {INSTEAD}"
            )
        return find_read_groups(model, {p: plain_name(path) for path, p in model.named_parameters() if p.requires_grad})

    def _trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen = set[nn.Parameter]()  # one that two parts share counts once, by its first name, as in one module
        for part in self._parts:
            for name, parameter in _name_parameters(part):
                if name in self._trained and parameter not in seen:
                    seen.add(parameter)
                    check_parameter(name, self._share_buffers)
                    yield name, parameter

    def _chosen_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = ((plain_name(path), buffer) for part in self._parts for path, buffer in part.named_buffers())
        return choose_buffers(named, self._share_buffers)


@lru_cache(NAMES)
def plain_name(path: str) -> str:
    """Return a parameter's name in the model without wrappers."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _name_parameters(part: nn.Module, own: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a part's parameters by their names in the model, or by those that they have in the part itself."""
    ties = {} if own else _ties(part)
    for path, parameter in part.named_parameters():
        name = plain_name(path)
        yield ties.get(name, name), parameter


def _ties(part: nn.Module) -> Mapping[str, str]:
    """Return the names in the model of the parameters that a part shares with an earlier one, by its own names.

    They are pushed once, from there, and written here, too (`PipelinePart.tied_names`).
    """
    return getattr(part, "tied_names", {})


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the model inside torch.compile and DistributedDataParallel, in either order."""
    while True:
        inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else _compiled_module(module)
        if inner is None:
            return module
        module = inner


def _compiled_module(module: nn.Module) -> nn.Module | None:
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()


def _describe_parameter(
    name: str, parameter: torch.Tensor, master: torch.Tensor | None, places: Places, read: bool = True
) -> HeldParameter:
    check_made(name, parameter)
    check_plain(name, _local_tensor(parameter))
    check_dtype(name, parameter.dtype)
    shape = tuple(parameter.shape)
    if is_dtensor(parameter):
        parts, local = _local_shard(name, parameter, places)
    else:
        parts, local = box_rects(shape, (0,) * len(shape), shape), parameter.detach()
    made = pair_blocks(name, local, parts)
    if master is None:
        return HeldParameter(name, shape, made if read else (), made)
    exact = pair_blocks(name, _local_tensor(master), parts)
    # A copy of 16 bits is no more exact than the parameter, of which what a pull rounds away is kept.
    return HeldParameter(name, shape, exact if master.dtype is torch.float32 else made, made, exact)


def _local_shard(name: str, parameter: DTensor, places: Places) -> tuple[list[Rect], torch.Tensor]:
    """Return this rank's rectangles of a DTensor and their memory; `places` caches computed rectangles."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in parameter.placements:
        if placement.is_partial():
            raise ConfigError(
                f"{name}: its placement {type(placement).__name__} is not supported: expected shards and replicas"
            )
    local = parameter.to_local().detach()
    if parameter.device_mesh.get_coordinate() is None:
        return [], local.flatten()[:0]
    key = (parameter.device_mesh, parameter.placements, parameter.shape)
    if key not in places:
        sizes, starts = compute_local_shape_and_global_offset(parameter.shape, *key[:2])
        places[key] = tuple(sizes), box_rects(parameter.shape, starts, sizes)
    sizes, rects = places[key]
    if tuple(local.shape) != sizes:
        raise ConfigError(f"{name}: expected a local shard of shape {sizes}, got {tuple(local.shape)}")
    return rects, local
