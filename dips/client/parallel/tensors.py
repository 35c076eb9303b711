"""Models of torch's own: plain, DDP, FSDP2 and HSDP (`fully_shard`), tensor parallel, and any mix of them by DTensor.

A DTensor knows where its local tensor lies, on a mesh of any dims, in uneven shards too; any other parameter lies
whole on this rank. On TP × FSDP the parameters without a TP plan live on the dp sub-mesh: every TP
rank holds a replica of their shards.

A push takes the parameters themselves: with FSDP2's mixed precision or autocast these are fp32 and exact. A model whose
own parameters are bf16 or fp16 has no fp32 masters: what it pushes is the parameter, and what it
pulls is rounded to its type, so outer changes below half a unit in the last place are lost on its clusters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dips.client.parallel.read_groups import INSTEAD, ReadGroup, find_read_groups
from dips.client.parallel.rect import Rect, box_rects
from dips.client.parallel.seam import Adapter, HeldParameter, check_dtype, pair_blocks
from dips.client.parallel.torch_types import is_dtensor, is_fsdp
from dips.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# By mesh, placements and shape: the local shape and its rectangles. torch takes 20 µs to compute them.
Places = dict[tuple[Any, ...], tuple[tuple[int, ...], list[Rect]]]

# Names that wrappers insert into a parameter's path.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class TorchAdapter(Adapter):
    """Parameters that are tensors or DTensors."""

    kind = "plain, DDP, FSDP2, HSDP or tensor-parallel"

    def __init__(self, parts: Sequence[nn.Module], staged: bool) -> None:
        """`staged`: the ranks hold different parts, under the names of the whole model (torch's pipelining)."""
        self._wrapped, self._parts, self.staged = parts, [_unwrap_module(part) for part in parts], staged

    def held_parameters(self) -> list[HeldParameter]:
        self.reshard()  # otherwise the parameters of a module that was evaluated are still gathered
        return list(self._held_parameters())

    def local_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.reshard()
        for part in self._parts:
            for path, parameter in part.named_parameters():
                local = parameter.to_local() if is_dtensor(parameter) else parameter
                yield plain_name(path), local.detach()

    def reshard(self) -> None:
        """FSDP2 keeps what its root gathered for a forward without a backward, and would compute with it again."""
        for part in self._parts:
            for module in part.modules():
                if is_fsdp(module):
                    cast(Any, module).reshard()

    def read_groups(self) -> list[ReadGroup]:
        if self.staged:
            raise ConfigError(f"install: lazy is not supported for a model given in parts: {INSTEAD}")
        (wrapped,), (model,) = self._wrapped, self._parts
        if getattr(wrapped, "mixed_precision", None) is not None:
            raise ConfigError(
                f"install: lazy: DistributedDataParallel(mixed_precision=…) reads all parameters at once: {INSTEAD}"
            )
        return find_read_groups(model, {p: plain_name(path) for path, p in model.named_parameters() if p.requires_grad})

    def _held_parameters(self) -> Iterator[HeldParameter]:
        places: Places = {}
        for part in self._parts:
            for path, parameter in part.named_parameters():
                if parameter.requires_grad:
                    yield _describe_parameter(plain_name(path), parameter, places)


def plain_name(path: str) -> str:
    """A parameter's name in the model itself."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _unwrap_module(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def _describe_parameter(name: str, parameter: nn.Parameter, places: Places) -> HeldParameter:
    check_dtype(name, parameter.dtype)
    shape = tuple(parameter.shape)
    if is_dtensor(parameter):
        parts, local = _local_shard(name, parameter, places)
    else:
        parts, local = box_rects(shape, (0,) * len(shape), shape), parameter.detach()
    made = pair_blocks(name, local, parts)
    return HeldParameter(name, shape, made, made)


def _local_shard(name: str, parameter: DTensor, places: Places) -> tuple[list[Rect], torch.Tensor]:
    """This rank's rectangles, and its memory of them; `places` are those that were computed before."""
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
