"""A small Llama laid over ranks in every way that torch itself has, for the scripts of this directory.

Sizes are chosen to hurt: no dim divides evenly by four, the norms are shorter than a shard, a bias sits on some layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention, silu

VOCABULARY, WIDTH, HEADS, HIDDEN, BLOCKS = 50, 24, 4, 44, 3


class LayoutAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=b) for b in (True, False, False))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        o = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(o.transpose(1, 2).reshape(batch, length, -1))


class LayoutBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = LayoutAttention()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.w2(silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    used = BLOCKS  # of its blocks, the first so many

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([LayoutBlock() for _ in range(BLOCKS)])
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers[: self.used]:
            x = block(x)
        return self.output(self.norm(x))


def build() -> Llama:
    """The model of `dips init --factory`; its numbers depend on torch's seed alone."""
    return Llama()


def seeded(seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return build()


def fsdp(model: Llama, mesh: Any) -> Llama:
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Llama, mesh: Any) -> Llama:
    plan = {name: ColwiseParallel() for name in ("attention.wq", "attention.wk", "attention.wv", "w1", "w3")}
    plan |= {name: RowwiseParallel() for name in ("attention.wo", "w2")}
    for block in model.layers:
        parallelize_module(block, mesh, plan)
    ends = {"embed": RowwiseParallel(input_layouts=Replicate()), "output": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, ends)


device = torch.device("cpu")  # of models and meshes; check_layouts.py sets it by --device


def laid(kind: str, model: Llama, world: int) -> tuple[nn.Module, Any]:
    """The model in the layout `kind` on all ranks, and the mesh over which its data is split (None: not at all)."""
    model = model.to(device)
    match kind:
        case "plain":
            return model, None
        case "ddp":
            return nn.parallel.DistributedDataParallel(model), init_device_mesh(device.type, (world,))
        case "fsdp":
            mesh = init_device_mesh(device.type, (world,))
            return fsdp(model, mesh), mesh
        case "hsdp":
            mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
            return fsdp(model, mesh), mesh
        case "tp":
            return tensor_parallel(model, init_device_mesh(device.type, (world,))), None
        case "tp_fsdp":
            mesh = init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=("dp", "tp"))
            return fsdp(tensor_parallel(model, mesh["tp"]), mesh["dp"]), mesh["dp"]
    raise ValueError(kind)


def full(parameter: torch.Tensor) -> torch.Tensor:
    """The whole parameter, from this rank's own shard and those of its peers; every rank calls it."""
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().clone()


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
