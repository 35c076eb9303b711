"""Runs planned pipelines on gloo ranks, their layers slept by the seconds of the plan.

`measure_step` forks the ranks. As a program one is a rank in a network namespace, whose links change between steps:

    pipeline_rank.py RANK RANKS STORE
    ["begin", plan, [F, I, W], fixed, rows, adapt]     a Pipeline whose layers sleep like that for a micro-batch of the
                                                       plan; rows of 32 bytes go over a border for each sample
    ["step"]                                           → [begin, end, gear, reason of its last change, loss]
    ["end"]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from datetime import timedelta
from statistics import median
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import play_ranks
from benchmarks.line_program import print_answer, read_requests
from benchmarks.namespaces import LINK
from dips.inside.pipeline import Pipeline
from dips.inside.planning.adapt import spell_gears
from dips.inside.planning.plan import spell_memory
from dips.inside.planning.simulate import PassSeconds, PipelineDevice, Prediction, SimulatedPipeline
from dips.inside.planning.timeline import spell_timeline

WIDTH, TIMEOUT_S = 8, 180


def spell_plan(
    pipeline: SimulatedPipeline,
    played: Prediction,
    cuts: Sequence[int],
    samples: int,
    recompute: bool = False,
    gears: Mapping[int, SimulatedPipeline] | None = None,
) -> dict[str, Any]:
    """Return what plan.yaml would hold of a pipeline that was simulated without a planner."""
    p = len(pipeline.stages)
    return {
        "model": "drawn",
        "plan": str(pipeline.schedule),
        "pipeline": {
            "schedule": str(pipeline.schedule),
            "ministages": pipeline.ministages,
            "samples": samples,
            "offload": pipeline.offload,
            "recompute": recompute,
            "stages": [
                {
                    "devices": [device.name for device in stage.devices],
                    "layers": [[cuts[v * p + s], cuts[v * p + s + 1]] for v in range(pipeline.ministages)],
                    "microbatches": [len(device.microbatches) for device in stage.devices],
                }
                for s, stage in enumerate(pipeline.stages)
            ],
            "orders": {device: " ".join(map(str, order)) for device, order in played.orders.items()},
            **(spell_memory(played) if pipeline.stages[0].devices[0].sizes else {}),
            **spell_timeline(played.spans),
            **(spell_gears(gears) if gears else {}),
        },
    }


class Slow(torch.autograd.Function):
    """The identity, which takes time in the forward and in the backward, and no processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        if not x.is_meta:
            time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class SlowLayer(nn.Module):
    """A layer that takes the seconds of its part on this device: I on the way to the input, W to the weights.

    The sum in front gives the first layer of the model an I, too. Of the seconds, those of `samples`, a share is
    `fixed`, whatever the number of samples.
    """

    def __init__(self, took: PassSeconds, samples: int = 1, fixed: float = 1.0) -> None:
        super().__init__()
        self.samples, self.fixed = samples, fixed
        self.took, self.start, self.weight = took, nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f, i, w = ((self.fixed + (1 - self.fixed) * len(x) / self.samples) * s for s in astuple(self.took))
        return Slow.apply(x + self.start, f, i) @ Slow.apply(self.weight, 0.0, w)


def measure_step(pipeline: SimulatedPipeline, played: Prediction, steps: int) -> tuple[float, int]:
    """Run a pipeline with a layer in each part; return median seconds of a step, and the actions of the busiest rank.

    A step takes from the first rank's begin, all having come, to the last one's end.
    """
    parts = len(pipeline.stages) * pipeline.ministages
    plan = spell_plan(pipeline, played, range(parts + 1), 1)
    places = [(s, device) for s, stage in enumerate(pipeline.stages) for device in stage.devices]
    found = play_ranks(_play_rank, [(plan, parts, *place, steps) for place in places], TIMEOUT_S)
    took = [max(ends) - min(begins) for begins, ends in zip(*(list(zip(*each, strict=True)) for each in (
        [of[0] for of in found], [of[1] for of in found])), strict=True)]  # fmt: skip
    return median(took), max(of[2] for of in found)


def _play_rank(
    plan: dict[str, Any], parts: int, stage: int, device: PipelineDevice, steps: int
) -> tuple[list[float], list[float], int]:
    """Return when each step began and ended, and the actions of a step."""
    stages = len(plan["pipeline"]["stages"])
    # Of other stages' layers only the shape counts.
    seconds = [device.seconds[part // stages] for part in range(parts)]
    pipe = Pipeline(
        lambda: (SlowLayer(took) for took in seconds),
        plan,
        loss=lambda output, targets: (output - targets).square().sum(),
        optimizer=lambda part: torch.optim.SGD(part.parameters(), lr=0.1),
        collective_s=TIMEOUT_S / 2,
    )
    total = sum(plan["pipeline"]["stages"][0]["microbatches"])
    batch, begins, ends = torch.ones(total, WIDTH), [], []
    for _ in range(steps + 1):
        dist.barrier()
        begins.append(time.monotonic())
        pipe.step((batch, 0 * batch))
        ends.append(time.monotonic())
    pipe.close()
    return begins[1:], ends[1:], len(pipe._gear.train_order)  # the first step makes connections and buffers


# ---- in a namespace --------------------------------------------------------------------------------------------------


def join_ranks(rank: int, ranks: int, store: str, interface: str = LINK) -> None:
    """Meet the others by a file, and say so; from now on only answers go to standard output."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    torch.set_num_threads(1)
    wait = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=wait)
    print_answer("ready")


def main(rank: int, ranks: int, store: str) -> None:
    """Join the others, then play what is asked for."""
    join_ranks(rank, ranks, store)
    pipe: Pipeline | None = None
    batch = torch.empty(0)
    for word, *given in read_requests():
        if word == "begin":
            pipe, batch = _begin(*given)
            print_answer("begun")
            continue
        assert pipe is not None
        if word == "end":
            pipe.close()
            print_answer("ended")
            continue
        dist.barrier()
        begin_s = time.monotonic()
        loss = pipe.step((batch, 0 * batch))
        print_answer([begin_s, time.monotonic(), pipe.gear, str(pipe.last_change or ""), loss])
    dist.destroy_process_group()


def _begin(
    plan: dict[str, Any], took: tuple[float, float, float], fixed: float, rows: int, adapt: bool
) -> tuple[Pipeline, torch.Tensor]:
    found = plan["pipeline"]
    pipe = Pipeline(
        lambda: (SlowLayer(PassSeconds(*took), found["samples"], fixed) for _ in found["stages"]),
        plan,
        loss=lambda output, targets: (output - targets).square().sum(),
        optimizer=lambda part: torch.optim.SGD(part.parameters(), lr=0.01),
        collective_s=TIMEOUT_S / 2,
        adapt="gears" if adapt else "off",
    )
    total = found["samples"] * sum(found["stages"][0]["microbatches"])
    return pipe, torch.ones(total, rows, WIDTH)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
