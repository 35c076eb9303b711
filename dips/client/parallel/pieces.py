"""Which ranges of the full parameters lie on this rank, as flat views of its memory, and which of them it speaks for.

A parameter that is replicated travels once: of all ranks that hold the same range, the first speaks for it in a push;
all of them receive it in a pull. What must stay true: over all ranks, the ranges spoken for cover every parameter
exactly once; a view shares memory with the parameter, so writing to it is installing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dips.errors import ConfigError
from dips.protocol.manifest import Manifest

# Names that wrappers put into the path of a parameter and that the model itself does not know.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True)
class LocalPiece:
    """`length` elements of one parameter's flattened full tensor from element `offset` on, as they lie on this rank."""

    layer: int  # index in the manifest
    param: int  # index in the layer
    offset: int
    length: int
    view: torch.Tensor  # f32[length], shares memory with the parameter
    speaks: bool  # this rank pushes it; False: another one does


@dataclass(frozen=True)
class Shards:
    """A model as this rank holds it."""

    manifest: Manifest
    pieces: tuple[LocalPiece, ...]  # what a pull must fill on this rank
    sharded: bool  # some parameter is spread over ranks

    @property
    def spoken(self) -> tuple[LocalPiece, ...]:
        """What this rank pushes."""
        return tuple(p for p in self.pieces if p.speaks)


def shards(model: nn.Module, rank: int = 0) -> Shards:
    """Lay out a plain, DDP or FSDP2 (`fully_shard`) model; `rank` is this process's in its training job.

    Tied parameters count once, under the first of their names. Raise ConfigError naming the parameter if its shard is
    not fp32, or lies in a way that is not one contiguous range of the full parameter.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    named = [(_plain_name(name), parameter) for name, parameter in model.named_parameters()]
    manifest = Manifest.from_shapes((name, tuple(parameter.shape)) for name, parameter in named)
    place = {p.name: (i, k) for i, layer in enumerate(manifest.layers) for k, p in enumerate(layer.parameters)}
    pieces = tuple(piece for name, p in named for piece in _pieces(name, p, place[name], rank))
    return Shards(manifest, pieces, any(isinstance(p, DTensor) for _, p in named))


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _pieces(name: str, parameter: nn.Parameter, place: tuple[int, int], rank: int) -> Iterator[LocalPiece]:
    if parameter.dtype is not torch.float32:
        raise ConfigError(
            f"{name}: expected a parameter of torch.float32, got {parameter.dtype}: "
            "keep fp32 parameters and compute in another type (mixed precision of FSDP2, autocast)"
        )
    lay: Callable[..., tuple[torch.Tensor, int, bool]] = _dtensor if isinstance(parameter, DTensor) else _whole
    local, offset, speaks = lay(name, parameter, rank)
    if local.numel() == 0:
        return
    if not local.is_contiguous():
        raise ConfigError(
            f"{name}: its memory of shape {tuple(local.shape)} is not contiguous: call .contiguous() on it"
        )
    yield LocalPiece(*place, offset, local.numel(), local.view(-1), speaks)


def _whole(name: str, parameter: nn.Parameter, rank: int) -> tuple[torch.Tensor, int, bool]:
    """A parameter that every rank holds whole: the first rank speaks for it."""
    return parameter.detach(), 0, rank == 0


def _dtensor(name: str, parameter: DTensor, rank: int) -> tuple[torch.Tensor, int, bool]:
    """A DTensor sharded on dim 0 over any number of mesh dims: one contiguous range."""
    for placement in parameter.placements:
        if not isinstance(placement, Replicate) and not (type(placement) is Shard and placement.dim == 0):
            raise ConfigError(f"{name}: its placement {placement} is not supported: expected Shard(0) or Replicate()")
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"{name}: rank {rank} is not in the parameter's device mesh: not supported")
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = parameter.to_local().detach()
    if tuple(local.shape) != tuple(shape):
        raise ConfigError(f"{name}: expected a local shard of shape {tuple(shape)}, got {tuple(local.shape)}")
    speaks = all(c == 0 for c, p in zip(coordinate, parameter.placements, strict=True) if isinstance(p, Replicate))
    return local, (start[0] if start else 0) * prod(parameter.shape[1:]), speaks
