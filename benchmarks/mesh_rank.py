"""One rank of mesh.py.

    mesh_rank.py FOLDER PLAN        (a plan as JSON)

Writes FOLDER/rankN.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.mesh import (
    BASELINE_S,
    BASELINE_STEPS,
    FORWARD_S,
    LAYERS,
    LOCAL_S,
    REPEATED_S,
    SECONDS,
    STEPS,
    WIDTH,
    lags,
)
from dips.config import Shared
from dips.inside.mesh import MeshLoop

EDIT = {
    "lr": 0.8, "momentum": 0.85, "step": "nesterov", "merge": "edit-paper", "clip": {"norm": 10.0, "per_layer": True},
}  # fmt: skip
RULES = Shared.model_validate({"run": "mesh", "outer": EDIT, "penalty": {"gates": ["edit"]}})


class SleptLayer(nn.Module):
    """A layer whose forward takes its share of the time, and no processor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Sleep, and read the weight."""
        time.sleep(seconds)
        return x + self.weight[0, 0]


class SleptModel(nn.Module):
    """Layers one after another."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SleptLayer(width) for _ in range(layers)])

    def forward(self, seconds: float) -> torch.Tensor:
        """Take `seconds` over all layers."""
        x = torch.zeros(())
        for layer in self.layers:
            x = layer(x, seconds / len(self.layers))
        return x


def make_model(mesh: DeviceMesh, layers: int, width: int) -> tuple[SleptModel, torch.optim.Optimizer]:
    model = SleptModel(layers, width)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


@torch.no_grad()
def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An inner step: the optimizer's hooks, and parameters that have moved."""
    optimizer.step()
    for parameter in model.parameters():
        parameter.to_local().add_(1e-4 * (1 + dist.get_rank()))  # type: ignore[attr-defined]


@torch.no_grad()
def delay(plan: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the end of an inner step to the end of the next forward: without a sync, and with both kinds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sync", "shard"))
    model, optimizer = make_model(mesh, LAYERS, WIDTH)
    loop = MeshLoop(model, mesh, optimizer, RULES, steps=2)
    found: dict[str, Any] = {"none": [], "whole": [], "lazy": []}
    for number in range(plan["rounds"] + 1):
        for kind in ("whole", "lazy"):
            for after in ("none", kind):  # τ = 2: each second step syncs
                take_step(model, optimizer)
                dist.barrier()
                begun = time.perf_counter()
                loop.step(tokens=1)
                if after == "whole":
                    loop.sync()
                model(FORWARD_S)
                took = time.perf_counter() - begun
                if number and (after == kind or kind == "lazy"):
                    found[after].append(took)
    layer = max(shard.numel for shard in loop._sync.shards)
    return {**found, "held": loop._sync.most_held_bytes, "layer": 4 * layer}


def stragglers(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Each run's steps of this replica, and its seconds."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("sync", "shard"))
    rank, scale = dist.get_rank(), plan["scale"]
    return [
        train_in_step(rank, scale, kind) if how == "baseline" else train_interval(mesh, scale, how, kind)
        for how, kind in plan["runs"]
    ]


def train_interval(mesh: DeviceMesh, scale: float, how: str, kind: str) -> dict[str, Any]:
    """One interval, from the begin for all to the end of its sync."""
    model, optimizer = make_model(mesh, 2, 8)
    by_steps, by_time = (STEPS, None) if how == "edit" else (None, SECONDS / scale)
    loop = MeshLoop(model, mesh, optimizer, RULES, steps=by_steps, seconds=by_time)
    late = lags(kind, 4 * STEPS, dist.get_rank())
    dist.barrier()
    loop._began_s = begun = time.monotonic()
    steps = 0
    while loop._steps or not steps:
        time.sleep((LOCAL_S + late[steps]) / scale)
        take_step(model, optimizer)
        steps += 1
        loop.step(tokens=1)
    loop.sync()
    if kind == "repeat":
        time.sleep(REPEATED_S / scale)
    took = time.monotonic() - begun
    loop.close()
    return {"steps": steps, "seconds": took}


def train_in_step(rank: int, scale: float, kind: str) -> dict[str, Any]:
    """Baseline: all-reduce of gradients in each step, whose own time is in the step's."""
    late, gradient = lags(kind, BASELINE_STEPS, rank), torch.zeros(64)
    step_s = BASELINE_S + (REPEATED_S if kind == "repeat" else 0.0)
    dist.barrier()
    begun = time.monotonic()
    for lag in late:
        time.sleep((step_s + lag) / scale)
        dist.all_reduce(gradient)
    return {"steps": BASELINE_STEPS, "seconds": time.monotonic() - begun}


def main(folder: Path, plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"delay": delay, "stragglers": stragglers}[plan["part"]](plan)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
