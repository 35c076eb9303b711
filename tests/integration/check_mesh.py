"""`MeshLoop` on the ranks of one torchrun: replicas × ranks of a replica.

torchrun --nproc-per-node N check_mesh.py OUT REPLICAS WHAT...     writes OUT.RANK as JSON

Each WHAT is a function here, on the device of DIPS_TEST_DEVICE. Two models of one seed go through the same steps: one
synchronises layer by layer in its forward, the other all at once between two steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import VOCABULARY, fsdp, full, local, seeded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.accelerator import DEVICE, take_device
from dips.config import Shared
from dips.errors import DipsError
from dips.inside.mesh import MeshLoop

COLLECTIVE_S = 5.0
EDIT = {
    "lr": 0.8,
    "momentum": 0.85,
    "step": "nesterov",
    "clip": {"norm": 0.05, "per_layer": True},
    "merge": "edit-paper",
}
PLAIN = {"lr": 1.0, "momentum": 0.0, "step": "sgd", "weights": "uniform"}
WARM = 2  # syncs without flags


def rules(outer: dict[str, Any], *gates: str) -> Shared:
    return Shared.model_validate(
        {"run": "r", "outer": outer, "penalty": {"gates": list(gates), "beta": 3.0, "warmup_rounds": WARM}}
    )


EDITED = rules(EDIT, "edit")


def tokens_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(0, VOCABULARY, (2, 9), generator=generator).to(DEVICE)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


class MeshSide:
    """A model on the mesh, its optimizer and its loop."""

    def __init__(self, mesh: DeviceMesh, ruled: Shared = EDITED, lr: float | None = None, **options: Any) -> None:
        self.model = fsdp(seeded().to(DEVICE), mesh["shard"])
        kind = torch.optim.AdamW if lr is None else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=1e-2 if lr is None else lr)
        self.loop = MeshLoop(self.model, mesh, self.optimizer, ruled, collective_s=COLLECTIVE_S, **options)

    def step(self, number: int, before: Callable[[nn.Module], None] = lambda _: None) -> float:
        self.optimizer.zero_grad()
        tokens = tokens_of(dist.get_rank(), number)
        loss = loss_of(self.model, tokens)
        loss.backward()
        self.optimizer.step()
        before(self.model)
        self.loop.step(tokens=tokens.numel(), loss=loss)
        return float(loss)

    def shards(self) -> list[torch.Tensor]:
        return [local(p).clone() for p in self.model.parameters()]

    def momenta(self) -> list[torch.Tensor]:
        return [shard.momentum.clone() for shard in self.loop._sync.shards if shard.momentum is not None]


def alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@torch.no_grad()
def spike(model: nn.Module) -> None:
    for p in model.parameters():
        local(p).mul_(100.0)


@torch.no_grad()
def spoil(model: nn.Module) -> None:
    for p in model.layers[1].parameters():  # type: ignore[union-attr, index]
        local(p).fill_(float("nan"))


def replicas_agree(side: MeshSide, mesh: DeviceMesh) -> bool:
    """Whether all ranks of a sync group hold the same bits."""
    mine = torch.cat([shard.flatten() for shard in side.shards()])
    of_all = [torch.empty_like(mine) for _ in range(mesh.size(0))]
    dist.all_gather(of_all, mine, group=mesh.get_group("sync"))
    return all(torch.equal(mine, other) for other in of_all)


def layer_by_layer(mesh: DeviceMesh) -> dict[str, Any]:
    """With a warm-up and without, one replica flagged and all: bit for bit the sync between steps."""
    return compare_sides(mesh, (1, 0), (2, 1))


def long_intervals(mesh: DeviceMesh) -> dict[str, Any]:
    """Likewise with more steps between two syncs."""
    return compare_sides(mesh, (3, 2), (8, 0))


def compare_sides(mesh: DeviceMesh, *cases: tuple[int, int]) -> dict[str, Any]:
    """Train both ways, with these intervals and steps of warm-up."""
    found: dict[str, Any] = {}
    groups = len(dist.distributed_c10d._world.pg_map)
    for every, warm in cases:
        lazy, whole = (MeshSide(mesh, steps=every, warmup_steps=warm) for _ in range(2))
        worst, pended, left_out, rolled_back = True, 0, list[Any](), True
        for number in range(warm + every * (WARM + 5)):
            sync, ends = divmod(number - warm + 1, every)
            whom = {WARM + 2: (0,), WARM + 4: tuple(range(mesh.size(0)))}.get(sync if not ends else -1, ())
            hurt = spike if mesh.get_local_rank("sync") in whom else lambda _: None
            losses = [side.step(number, hurt) for side in (lazy, whole)]
            pended += lazy.loop._sync.pending
            anchor = [
                view.to(DEVICE, copy=True)
                for shard in whole.loop._sync.shards
                for _, _, view in shard.split(shard.anchor)
            ]
            if whole.loop.is_synced() and number >= warm:
                left_out.append(whole.loop.last_sync.left_out)
                if len(whom) == mesh.size(0):
                    held = [local(p) for shard in whole.loop._sync.shards for p in shard.group.reads.values()]
                    rolled_back &= alike(anchor, held)
            worst &= losses[0] == losses[1]
            worst &= mesh.size(0) == 1 or replicas_agree(whole, mesh) == whole.loop.is_synced()
        lazy.loop.sync()
        whole.loop.sync()
        found[f"{every}/{warm}"] = {
            "same": worst and alike(lazy.shards(), whole.shards()) and alike(lazy.momenta(), whole.momenta()),
            "pended": pended, "left_out": left_out, "rolled_back": rolled_back,
            "agree": replicas_agree(lazy, mesh), "moved": any(bool(m.any()) for m in lazy.momenta()),
        }  # fmt: skip
        held = lazy.loop._sync
        largest = max(shard.numel for shard in held.shards)
        found["held"] = [held.most_held_bytes, 4 * 5 * largest]  # two sums, and one layer's outer state
        lazy.loop.close()
        whole.loop.close()
        assert len(dist.distributed_c10d._world.pg_map) == groups, "what was closed keeps no process group"
    return found


def synchronous(mesh: DeviceMesh) -> dict[str, Any]:
    """τ = 1 and SGD: the model that all ranks' gradients, averaged, would have trained; after a warm-up, too."""
    world, found = dist.get_world_size(), {}
    for name, options in {"outer": {"steps": 1}, "warm-up": {"steps": 8, "warmup_steps": 4}}.items():
        side, plain = MeshSide(mesh, rules(PLAIN), lr=0.1, **options), seeded().to(DEVICE)
        for number in range(4):
            side.step(number)
            plain.zero_grad()
            (sum(loss_of(plain, tokens_of(rank, number)) for rank in range(world)) / world).backward()
            with torch.no_grad():
                for p in plain.parameters():
                    p.sub_(0.1 * p.grad)
        side.loop.sync()
        pairs = zip(side.model.parameters(), plain.parameters(), strict=True)
        found[name] = max(float((full(ours) - theirs).abs().max()) for ours, theirs in pairs)
        side.loop.close()
    return found


def not_finite(mesh: DeviceMesh) -> dict[str, Any]:
    """A NaN on one replica is left out in its layer, replaced by the sync, and its optimizer begins anew."""
    side, last = MeshSide(mesh, steps=2), mesh.size(0) - 1
    mine = mesh.get_local_rank("sync") == last
    side.step(0)
    side.step(1, spoil if mine else lambda _: None)
    side.loop.sync()
    states = len(side.optimizer.state)
    report = side.loop.last_sync
    finite = all(bool(torch.isfinite(shard).all()) for shard in side.shards())
    losses = [side.step(number) for number in (2, 3)]
    return {
        "finite": finite and all(loss == loss for loss in losses),
        "agree": replicas_agree(side, mesh) or side.loop._sync.pending,
        "report": [report.not_finite, report.left_out], "reset": (states == 0) == mine, "last": last,
    }  # fmt: skip


def timed(mesh: DeviceMesh) -> dict[str, Any]:
    """A-EDiT: replicas of unequal speed meet after a time, in unequal numbers of steps, and hold one model."""
    side = MeshSide(mesh, rules({**EDIT, "merge": "edit"}, "edit"), seconds=0.8)
    pause, number = (0.02, 0.3)[mesh.get_local_rank("sync")], 0
    while side.loop.last_sync is None:
        time.sleep(pause)
        side.step(number)
        number += 1
        if not side.loop._steps:
            side.loop.is_synced()
    found = {"steps": side.loop.last_sync.inner_steps, "taken": number, "agree": replicas_agree(side, mesh)}
    if mesh.get_local_rank("shard") == 0:
        side.loop._began_s -= 1000.0  # the clock of one rank of each replica is ahead: both sync
    side.step(number)
    return {**found, "syncs": side.loop._merges.syncs + side.loop._sync.pending}


def idle(mesh: DeviceMesh) -> dict[str, Any]:
    """By time, a replica may have taken no step since the last sync when `sync` is called: it brings what it holds."""
    side = MeshSide(mesh, rules(PLAIN), lr=0.1, seconds=1000.0)
    for number in range(2):
        side.step(number)
    side.loop.sync()
    between = side.shards()
    if mesh.get_local_rank("sync") == 0:
        side.step(2)
    mine = side.shards()
    of_all = [[torch.empty_like(shard) for _ in range(mesh.size(0))] for shard in mine]
    for shard, of_one in zip(mine, of_all, strict=True):
        dist.all_gather(of_one, shard, group=mesh.get_group("sync"))
    side.loop.sync()
    assert side.loop.last_sync is not None
    means = [sum(of_one) / mesh.size(0) for of_one in of_all]
    return {
        "steps": side.loop.last_sync.inner_steps, "agree": replicas_agree(side, mesh),
        "moved": not alike(between, side.shards()),
        "off": max(float((ours - mean).abs().max()) for ours, mean in zip(side.shards(), means, strict=True)),
    }  # fmt: skip


def carried_out(mesh: DeviceMesh) -> dict[str, Any]:
    """By time, `sync` may find one replica a step behind a sync that the other has still to carry out."""
    side = MeshSide(mesh, rules(PLAIN), lr=0.1, seconds=1000.0)
    side.loop._began_s -= 2000.0
    side.step(0)
    if mesh.get_local_rank("sync") == 0:
        side.step(1)
    side.loop.sync()
    assert side.loop.last_sync is not None
    return {"steps": side.loop.last_sync.inner_steps, "agree": replicas_agree(side, mesh)}


def saved(mesh: DeviceMesh) -> dict[str, Any]:
    """A checkpoint by torch.distributed.checkpoint, loaded in place into new objects: training goes on as it would."""
    path = Path(os.environ["CHECK_MESH_CHECKPOINT"])
    side = MeshSide(mesh, steps=2)
    if not path.exists():
        between = ""
        for number in range(5):
            side.step(number)
        try:
            side.loop.state_dict()
        except DipsError as error:
            between = str(error)
        side.loop.sync()
        dist.barrier()
        dcp.save({"model": side.model.state_dict(), "loop": side.loop.state_dict()}, checkpoint_id=path)
        found = {"between": between}
    else:
        found = {}
    again = MeshSide(mesh, steps=2)
    state = {"model": again.model.state_dict(), "loop": again.loop.state_dict()}
    dcp.load(state, checkpoint_id=path)
    again.model.load_state_dict(state["model"])
    again.loop.load_state_dict(state["loop"])
    found |= {"syncs": again.loop._merges.syncs, "steps": again.loop.inner_steps, "agree": replicas_agree(again, mesh)}
    if "between" in found:
        found["same"] = alike(side.shards(), again.shards()) and alike(side.momenta(), again.momenta())
        found["moved"] = any(bool(m.any()) for m in again.momenta())
    for number in range(5, 9):
        again.step(number)
    again.loop.sync()
    return {**found, "after": replicas_agree(again, mesh), "last": again.loop._merges.syncs}


class WideBlock(nn.Module):
    """A block of 64 MiB, beside whose layer's tensors all else is small."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4096, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def allocated(mesh: DeviceMesh) -> dict[str, Any]:
    """By an accelerator's allocator: bytes that a step with a sync holds beyond one without, in layers."""
    memory: Any = torch.get_device_module(DEVICE)
    torch.manual_seed(0)
    model = nn.Sequential(*(WideBlock() for _ in range(12))).to(DEVICE)
    for block in model:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loop = MeshLoop(model, mesh, optimizer, EDITED, collective_s=30.0, steps=3)
    peaks, rows = list[int](), torch.ones(8, 4096, device=DEVICE)
    for _ in range(7):
        memory.reset_peak_memory_stats()
        model(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        peaks.append(memory.max_memory_allocated())
        loop.step(tokens=8)
        peaks[-1] = max(peaks[-1], memory.max_memory_allocated())
    loop.close()
    return {"layers": [(peak - peaks[1]) / (4 * 4096 * 4096) for peak in peaks]}


def refused(mesh: DeviceMesh) -> dict[str, Any]:
    """What is refused, each with one sentence for all ranks."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    compiled, smaller = seeded(), seeded()
    if mesh.get_local_rank("sync") == 0:
        smaller.output = nn.Linear(smaller.output.in_features, 2 * VOCABULARY, bias=False)
    with mock.patch("torch.compile", lambda function, **_: function):  # whose imports take each rank a second
        compiled.layers[0].compile()
    hsdp, ddp = fsdp(seeded(), mesh), nn.parallel.DistributedDataParallel(seeded())
    model, others = fsdp(seeded(), mesh["shard"]), fsdp(seeded(dist.get_rank()), mesh["shard"])
    whole_clip = rules({"clip": {"norm": 1.0}})
    given: dict[str, tuple[Any, ...]] = {
        "no rectangle": (model, flat, EDITED, {}),
        "τ = 0": (model, mesh, EDITED, {"steps": 0}),
        "both": (model, mesh, EDITED, {"steps": 2, "seconds": 1.0}),
        "HSDP": (hsdp, mesh, EDITED, {}),
        "DDP": (ddp, mesh, EDITED, {}),
        "plain": (seeded(), mesh, EDITED, {}),
        "compiled": (fsdp(compiled, mesh["shard"]), mesh, EDITED, {}),
        "clip": (model, mesh, whole_clip, {}),
        "gates": (model, mesh, rules(EDIT, "dips"), {}),
        "merge": (model, mesh, rules({"merge": "rda"}), {}),
        "another τ on one rank": (model, mesh, EDITED, {"steps": 2 + (dist.get_rank() == world - 1)}),
        "other values": (others, mesh, EDITED, {}),
        "sharded over all": (fsdp(seeded(), flat), mesh, EDITED, {}),
        "not all ranks": (model, DeviceMesh("cpu", [[0, 1]]), EDITED, {}),
        "other shapes": (fsdp(smaller, mesh["shard"]), mesh, EDITED, {}),
    }
    found: dict[str, Any] = {}
    for name, (built, on, ruled, options) in given.items():
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
        try:
            MeshLoop(built, on, optimizer, ruled, **options)
            found[name] = ""
        except DipsError as error:
            found[name] = f"{type(error).__name__}: {error}"
    side = MeshSide(mesh, steps=2)
    side.step(0)
    try:  # one replica thinks that it is due, the others ask for it
        side.step(1) if mesh.get_local_rank("sync") else side.loop.sync()
        found["disagree"] = ""
    except DipsError as error:
        found["disagree"] = str(error)
    return found


def a_rank_dies(mesh: DeviceMesh) -> dict[str, Any]:
    """The last rank is gone when a sync has begun: the others hold what all had after the sync before."""
    side, other = MeshSide(mesh, steps=1), MeshSide(mesh, steps=1)
    side.step(0)
    side.loop.sync()
    synced = side.shards()
    side.step(1)
    if dist.get_rank() == dist.get_world_size() - 1:
        return {"died": True}
    time.sleep(0.5)
    began, told = time.monotonic(), ["", ""]
    for i in range(2):
        try:
            side.loop.sync()
        except DipsError as error:
            told[i] = f"{type(error).__name__}: {error}"
    found = {"told": told, "seconds": time.monotonic() - began, "whole": alike(synced, side.shards())}
    side.model.state_dict()  # can be saved: no hook of the sync that failed is left
    try:
        other.loop.sync()
    except DipsError as error:
        found["missed"] = f"{type(error).__name__}: {error}"
    return found


def main(out: Path, replicas: int, words: list[str]) -> None:
    torch.set_num_threads(1)
    take_device(DEVICE, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(DEVICE))  # alone: no other for tensors of the host
    mesh = init_device_mesh(
        DEVICE, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("sync", "shard")
    )  # fmt: skip
    found = {word: globals()[word](mesh) for word in words}
    out.with_name(f"{out.name}.{dist.get_rank()}").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # groups of which a rank has died cannot be destroyed in order


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
