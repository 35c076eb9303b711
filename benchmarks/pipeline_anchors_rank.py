"""A rank that trains slept layers by a plan, or by torch's own schedules and FSDP2 with the same cuts.

pipeline_anchors_rank.py RANK RANKS STORE INTERFACE
["begin", way, job]     a way of `WAYS`; the job as `SleptJob` spells it
["step"]                → [begin, end, most bytes of gathered parameters]
["end"]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from benchmarks.line_program import print_answer, read_requests
from benchmarks.pipeline_rank import TIMEOUT_S, WIDTH, Slow, join_ranks
from dips.inside.pipeline import Pipeline
from dips.inside.pipeline.torch_runtime import count_gathered

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class BegunWay:
    """A way of training under way on this rank."""

    step: Step
    parts: list[nn.Module]
    close: Step = lambda: None


@dataclass(frozen=True, slots=True)
class SleptJob:
    """A model whose layers sleep, and this rank's part in it."""

    plan: dict[str, Any]  # of our way
    device: str  # in it
    seconds: list[list[float]]  # F, I and W of each layer for a micro-batch, on this rank
    cuts: list[int]  # where each part begins, and the number of layers at the end
    ministages: int
    samples: int  # of a micro-batch
    microbatches: int
    rows: int  # of 32 bytes that go over a border for each sample
    weights: int  # rows of 32 bytes that a layer has, where they are sharded

    def make_layers(self, begin: int, end: int, rows: int = 1) -> list[nn.Module]:
        """Return some layers of the model, with so many rows of parameters each."""
        return [IdleLayer(took, self.samples, rows) for took in self.seconds[begin:end]]

    def batch(self, samples: int) -> torch.Tensor:
        return torch.zeros(samples, self.rows, WIDTH)


class Touch(torch.autograd.Function):
    """Gives its first input as it is, whatever its size, and asks for gradients of both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.like = weight
        return x.data  # no view: torch's split backward refuses one

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], torch.zeros_like(ctx.like)


class IdleLayer(nn.Module):
    """A layer that computes nothing in its seconds: only what is sent and gathered is real.

    The first parameter gives the model's first layer an I, too.
    """

    def __init__(self, took: list[float], samples: int, rows: int) -> None:
        super().__init__()
        self.took, self.samples = took, samples
        self.start, self.weight = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(rows, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f, i, w = (len(x) / self.samples * seconds for seconds in self.took)
        return Touch.apply(Slow.apply(Touch.apply(x, self.start), f, i), Slow.apply(self.weight, 0.0, w))


def summed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that reads one number of each sample."""
    return output[:, 0, 0].sum() + targets[:, 0, 0].sum()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


# ---- ways ------------------------------------------------------------------------------------------------------------


def begin_plan(job: SleptJob) -> BegunWay:
    """The plan, on our runtime."""
    rows = job.weights if any(len(stage["devices"]) > 1 for stage in job.plan["pipeline"]["stages"]) else 1
    pipe = Pipeline(
        lambda: iter(job.make_layers(0, job.cuts[-1], rows)),
        job.plan,
        loss=summed,
        optimizer=sgd,
        device_name=job.device,
        collective_s=TIMEOUT_S / 2,
    )
    batch = job.batch(job.samples * job.microbatches)
    return BegunWay(lambda: pipe.step((batch, batch)), list(pipe.parts), pipe.close)


def begin_single(schedule: Any) -> Callable[[SleptJob], BegunWay]:
    """One of torch's schedules, one part on each rank in order."""

    def begin(job: SleptJob) -> BegunWay:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        part = nn.Sequential(*job.make_layers(job.cuts[rank], job.cuts[rank + 1]))
        stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
        stages = stage if schedule in (ScheduleGPipe, Schedule1F1B) else [stage]
        made = schedule(stages, job.microbatches, loss_fn=summed)
        batch = job.batch(job.samples * job.microbatches)
        return BegunWay(make_step(made, [part], batch, rank == 0, rank == ranks - 1), [part])

    return begin


def begin_looped(job: SleptJob) -> BegunWay:
    """torch's ScheduleLoopedBFS over ministages that `fully_shard` shards, stages of equally many ranks."""
    parts = len(job.cuts) - 1
    stages = parts // job.ministages
    replicas = dist.get_world_size() // stages
    mesh = init_device_mesh("cpu", (stages, replicas), mesh_dim_names=("stage", "shard"))
    group, at = mesh["stage"].get_group(), mesh["stage"].get_local_rank()
    own = {}
    for number in range(at, parts, stages):
        layers = job.make_layers(job.cuts[number], job.cuts[number + 1], job.weights)
        for module in (*layers, part := nn.Sequential(*layers)):
            fully_shard(module, mesh=mesh["shard"], reshard_after_forward=False)
        own[number] = part
    made = ScheduleLoopedBFS(
        [PipelineStage(part, number, parts, torch.device("cpu"), group=group) for number, part in own.items()],
        job.microbatches // replicas,
        loss_fn=summed,
    )
    batch = job.batch(job.samples * job.microbatches // replicas)
    return BegunWay(make_step(made, own.values(), batch, 0 in own, parts - 1 in own), list(own.values()))


def begin_fsdp(job: SleptJob) -> BegunWay:
    """FSDP2 over all ranks with equal shares, each of which is one micro-batch."""
    layers = job.make_layers(0, job.cuts[-1], job.weights)
    for module in (*layers, model := nn.Sequential(*layers)):
        fully_shard(module)
    optimizer = sgd(model)
    batch = job.batch(job.samples * job.microbatches // dist.get_world_size())

    def step() -> None:
        summed(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return BegunWay(step, [model])


def make_step(schedule: Any, parts: Any, batch: torch.Tensor, first: bool, last: bool) -> Step:
    """Return what plays a step of one of torch's schedules, and steps the optimizers after it."""
    optimizers = [sgd(part) for part in parts]
    given: dict[str, Any] = {"target": batch, "losses": []} if last else {}

    def step() -> None:
        schedule.step(*((batch,) if first else ()), **given)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


WAYS: Mapping[str, Callable[[SleptJob], BegunWay]] = {
    "plan": begin_plan,
    "GPipe": begin_single(ScheduleGPipe),
    "1F1B": begin_single(Schedule1F1B),
    "InterleavedZeroBubble": begin_single(ScheduleInterleavedZeroBubble),
    "FSDP2": begin_fsdp,
    "LoopedBFS": begin_looped,
}


# ---- gathered bytes --------------------------------------------------------------------------------------------------


class GatheredPeak:
    """The most bytes of whole parameters that `fully_shard` has held of some modules, when layers were computed and
    when gradients came.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        self.nbytes, self._parts = 0, parts
        for module in [m for part in parts for m in part.modules()]:
            module.register_forward_hook(self._count)
        for parameter in [p for part in parts for p in part.parameters()]:
            parameter.register_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.nbytes = max(self.nbytes, sum(map(count_gathered, self._parts)))


# ---- the program -----------------------------------------------------------------------------------------------------


def main(rank: int, ranks: int, store: str, interface: str) -> None:
    """Join the others, then play what is asked for."""
    join_ranks(rank, ranks, store, interface)
    begun, peak = BegunWay(lambda: None, []), GatheredPeak([])
    for word, *given in read_requests():
        if word == "begin":
            begun.close()
            way, job = given
            begun = WAYS[way](SleptJob(**job))
            peak = GatheredPeak(begun.parts)
            print_answer("begun")
        else:
            dist.barrier()
            peak.nbytes = 0
            begin_s = time.monotonic()
            begun.step()
            print_answer([begin_s, time.monotonic(), peak.nbytes])
    begun.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
