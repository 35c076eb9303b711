"""Train a small decoder in torch's own layouts: plain, FSDP2, HSDP, or tensor parallel with FSDP2.

    dips init --config dips.yaml --factory fsdp2:build --seed 1        # in this directory
    dips-client --config cluster.yaml -- torchrun --nproc-per-node 4 fsdp2.py --layout tp_fsdp

Clusters may differ in layout and in number of ranks: the global model is made of full parameters. What Di-PS adds is
marked on the right. The data are counted sequences of bytes, different ones on every rank and in every cluster.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dips.client import OuterLoop  # 1
from dips.demo.model import Decoder, Shape, loss_of

SEQUENCES, LENGTH = 4, 32
TP = 2


def build() -> Decoder:
    """The model of `dips init --factory`."""
    return Decoder(Shape(width=64, layers=3, heads=4, hidden=176))


def main(words: Sequence[str] | None = None) -> tuple[nn.Module, list[float]]:
    """Train until the run is over; return the model and the loss of each inner step on this rank."""
    args = _arguments(words)
    device = own_device()
    if "RANK" in os.environ:
        dist.init_process_group()
    model, group = laid_out(build().to(device), args.layout, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = torch.Generator().manual_seed(args.seed * 1000 + group)
    losses: list[float] = []
    with OuterLoop(model) as outer:  # 2
        while not outer.finished:
            loss = loss_of(model, batch(data).to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            outer.step(tokens=SEQUENCES * LENGTH * groups(args.layout), loss=loss)  # 3
    return model, losses


def own_device() -> torch.device:
    """This rank's accelerator, made the current one: a mesh that is made before would have all ranks use the first."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def laid_out(model: Decoder, layout: str, device: torch.device) -> tuple[nn.Module, int]:
    """Spread the model over the ranks; return it, and which part of the data this rank trains on."""
    if layout == "plain":
        return model, 0
    world = dist.get_world_size()
    if layout == "hsdp":
        mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
        return fsdp(model, mesh), dist.get_rank()
    if layout == "fsdp":
        return fsdp(model, init_device_mesh(device.type, (world,))), dist.get_rank()
    mesh = init_device_mesh(device.type, (world // TP, TP), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    return fsdp(model, mesh["dp"]), mesh["dp"].get_local_rank()


def fsdp(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Split feed-forward, embedding and output; attention and norms have no plan and are replicated over TP."""
    for block in model.layers:
        plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
        parallelize_module(block, mesh, {f"feed_forward.{name}": style for name, style in plan.items()})
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def groups(layout: str) -> int:
    """How many different batches the cluster trains on in one step."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return world // TP if layout == "tp_fsdp" else world


def batch(data: torch.Generator) -> torch.Tensor:
    """Sequences that count up from anywhere, by 1 to 4: int64 [SEQUENCES, LENGTH + 1]."""
    begin = torch.randint(0, 256, (SEQUENCES, 1), generator=data)
    step = torch.randint(1, 5, (SEQUENCES, 1), generator=data)
    return (begin + step * torch.arange(LENGTH + 1)) % 256


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=["plain", "fsdp", "hsdp", "tp_fsdp"], default="fsdp")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1, help="of the data; another one in each cluster")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
