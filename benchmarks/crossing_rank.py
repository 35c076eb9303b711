"""A rank in a network namespace that trains one slept model in several ways; see adapter_crossings.py.

    crossing_rank.py RANK RANKS STORE

    ["make", layers, numel, [f, i, w]]     layers of so many parameters, whose passes take slope × samples + start
                                           seconds, each pair; ranks 0 and 1 are a site, 2 and 3 the other
    ["plan", plan, floats]                 the pipeline to be run; so many floats of a sample go over a border
    [way, samples]                         a step of FSDP2, HSDP, EDiT or a site alone over so many samples of this
                                           rank, or of the pipeline → [begin, end]

FSDP2 on CPUs waits for each collective. Here gathers are asked for a layer ahead, and reductions end before the
optimizer steps, as on an accelerator, where streams do that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.adapter_crossings import EDIT_STEPS
from benchmarks.line_program import print_answer, read_requests
from benchmarks.mesh_rank import RULES, take_step
from benchmarks.pipeline_rank import TIMEOUT_S, Slow, join_ranks
from dips.inside.mesh import MeshLoop
from dips.inside.pipeline import Pipeline

Line = tuple[float, float]  # seconds per sample, seconds of any micro-batch


class JoinedInputs(torch.autograd.Function):
    """The first of two tensors; the gradient of the second is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape = weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], gradients[0].new_zeros(ctx.shape)


class WeightyLayer(nn.Module):
    """A layer of many parameters that takes its seconds and next to no processor."""

    def __init__(self, numel: int, lines: Sequence[Line]) -> None:
        super().__init__()
        self.lines, self.start, self.weight = lines, nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f, i, w = (slope * len(x) + start for slope, start in self.lines)
        return JoinedInputs.apply(Slow.apply(x + self.start, f, i), Slow.apply(self.weight, 0.0, w))


class PendingReductions:
    """Reductions under way, which `fully_shard` begins; their tensors are held until all have ended."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, torch.Tensor]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any
    ) -> None:
        """Begin the reduce-scatter of a layer's gradient."""
        self._held.append((dist.reduce_scatter_single(output_tensor, input_tensor, op, group, True), input_tensor))

    def average(self, group: dist.ProcessGroup, gradient: torch.Tensor) -> None:
        """Begin to sum a layer's shard of the gradient over the sites."""
        self._held.append((dist.all_reduce(gradient, group=group, async_op=True), gradient))

    def finish(self) -> None:
        """Wait for all of them."""
        for work, _ in self._held:
            work.wait()
        self._held.clear()


class ShardedModel:
    """The layers under FSDP2, and a step of them."""

    def __init__(self, layers: Sequence[Any], mesh: DeviceMesh, between: dist.ProcessGroup | None = None) -> None:
        """Shard over a mesh of one dim.

        between   the group of the same shards on other meshes, over which gradients are averaged (HSDP)
        """
        self._reductions = PendingReductions()
        for layer in layers:
            made: Any = fully_shard(layer, mesh=mesh)
            made.set_gradient_divide_factor(1.0)
            made.set_force_sum_reduction_for_comms(True)
            if between is None:
                made.set_custom_reduce_scatter(self._reductions)
            else:
                made.set_all_reduce_hook(partial(self._reductions.average, between))
        self._model = cast(Any, fully_shard(nn.Sequential(*layers), mesh=mesh))
        self._model._set_unshard_async_op(True)  # wart: there is no public name; without it a prefetch waits at once
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)
        self._gather_ahead(layers)

    def _gather_ahead(self, layers: Sequence[Any]) -> None:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])

    def take_step(self, samples: int) -> None:
        """Train on so many samples of this rank."""
        self._model(torch.ones(samples, 1, requires_grad=True)).sum().backward()
        self._reductions.finish()
        self._end_step(samples)
        self._optimizer.zero_grad()

    def _end_step(self, samples: int) -> None:
        self._optimizer.step()


class AveragedModel(ShardedModel):
    """The layers sharded in each site, and averaged between sites by EDiT."""

    def __init__(self, layers: Sequence[Any], mesh: DeviceMesh) -> None:
        super().__init__(layers, mesh["shard"])
        self._loop = MeshLoop(self._model, mesh, self._optimizer, RULES, steps=EDIT_STEPS, collective_s=TIMEOUT_S / 2)

    def _gather_ahead(self, layers: Sequence[Any]) -> None:
        """Gather each layer when the forward comes to it: its sync lands just before."""

    def _end_step(self, samples: int) -> None:
        take_step(self._model, self._optimizer)
        self._loop.step(tokens=samples)


class PipelinedModel:
    """The layers as a pipeline by a plan."""

    def __init__(self, make_layers: Callable[[], Any], plan: dict[str, Any], floats: int) -> None:
        self.pipe = Pipeline(
            make_layers,
            plan,
            loss=lambda output, targets: (output - targets).square().sum(),
            optimizer=lambda part: torch.optim.SGD(part.parameters(), lr=0.0),
            collective_s=TIMEOUT_S / 2,
        )
        found = plan["pipeline"]
        self._batch = torch.ones(found["samples"] * sum(found["stages"][0]["microbatches"]), floats)

    def take_step(self, samples: int) -> None:
        """Train on the whole batch; `samples` of a rank are the plan's."""
        self.pipe.step((self._batch, 0 * self._batch))


class CrossingRank:
    """What is asked of this rank."""

    def __init__(self, ranks: int) -> None:
        self._mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("sync", "shard"))
        self._every = init_device_mesh("cpu", (ranks,))
        self._numel, self._layers, self._lines = 0, 0, list[Line]()
        self._ways: dict[str, Any] = {}

    def make(self, layers: int, numel: int, lines: list[Line]) -> None:
        """Make the models that are sharded."""
        self._layers, self._numel, self._lines = layers, numel, lines
        self._ways["FSDP2"] = ShardedModel(list(self._make_layers()), self._every)
        between = self._mesh.get_group("sync")
        self._ways["HSDP"] = ShardedModel(list(self._make_layers()), self._mesh["shard"], between)
        self._ways["site"] = ShardedModel(list(self._make_layers()), self._mesh["shard"])
        self._ways["EDiT"] = AveragedModel(list(self._make_layers()), self._mesh)

    def plan(self, plan: dict[str, Any], floats: int) -> None:
        """Make the pipeline, in place of the one before."""
        if (before := self._ways.get("pipeline")) is not None:
            before.pipe.close()
        self._ways["pipeline"] = PipelinedModel(self._make_layers, plan, floats)

    def take_step(self, way: str, samples: int) -> tuple[float, float]:
        """Return when a step began, all having come, and when it ended."""
        dist.barrier()
        begin_s = time.monotonic()
        self._ways[way].take_step(samples)
        return begin_s, time.monotonic()

    def _make_layers(self) -> Any:
        return (WeightyLayer(self._numel, self._lines) for _ in range(self._layers))


def main(rank: int, ranks: int, store: str) -> None:
    """Join the others, then do what is asked for."""
    join_ranks(rank, ranks, store)
    here = CrossingRank(ranks)
    for word, *given in read_requests():
        makes: Any = {"make": here.make, "plan": here.plan}.get(word)
        print_answer(makes(*given) if makes is not None else here.take_step(word, *given))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
