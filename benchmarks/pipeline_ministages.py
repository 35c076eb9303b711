"""`pipeline --part ministages`: memory and seconds of a step by the number of ministages, with offload and without.

Two stages of two ranks hold 16 layers, each slept 0.1 s forward and 0.3 s backward. Their bytes and the rate of the
copy engine are in proportion to blocks of a 7-billion-parameter model on A100s: a border is a twelfth of a layer's
parameters, and a rank's share of these is copied in two thirds of a forward. What is compared are bytes of the rank
that needs the most, by its account, and seconds of a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Bench, play_ranks
from benchmarks.pipeline_rank import Slow, spell_plan
from dips.inside.pipeline import EmulatedDevice, Pipeline
from dips.inside.planning.profile import GBIT_BYTES
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.simulate import (
    MemoryCategory,
    PartBytes,
    PassSeconds,
    PipelineDevice,
    PipelineStage,
    Route,
    SimulatedPipeline,
    simulate,
)

LAYERS, STAGES, RANKS = 16, 2, 2  # ranks of each stage
FORWARD_S, BACKWARD_S = 0.1, 0.3  # of a layer; the backward computes the forward again
WIDTH, ROWS = 64, 5  # of a layer, and of a micro-batch
PARAMETERS, BORDER = 4 * WIDTH * (WIDTH + 1), 4 * WIDTH * ROWS  # bytes
COPY_BYTE_S = 2 / 3 * FORWARD_S / (PARAMETERS / RANKS)
TIMEOUT_S = 300
LESS, SLOWER, OFFLOAD = 0.4, 1.05, 0.03


class WideLayer(nn.Module):
    """A layer that takes its seconds asleep."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(x + torch.tanh(self.inner(x)), FORWARD_S, BACKWARD_S)


@dataclass(frozen=True, slots=True)
class MinistageRun:
    """What is run, and the seconds of a step and bytes by category of the rank with the most that came of it."""

    ministages: int
    offload: bool = False
    late: bool = False  # optimizers step at the end, as with a norm of the whole model
    seconds: float = 0.0
    nbytes: int = 0
    gradients: int = 0


def compare_ministages(bench: Bench) -> None:
    """One ministage a rank beside one for each layer: bytes by account, seconds, and what offload adds to them."""
    microbatches, most = (2, 4) if bench.quick else (8, LAYERS // STAGES)
    runs = [
        run_ministages(bench, each, microbatches)
        for each in (
            MinistageRun(1, offload=True), MinistageRun(1), *(MinistageRun(n) for n in (2, 4) if n < most),
            MinistageRun(most), MinistageRun(most, offload=True), MinistageRun(most, late=True),
        )
    ]  # fmt: skip
    (one_offloaded, one), (many, offloaded, late) = runs[:2], runs[-3:]
    for run in runs:
        name = f"{run.ministages} ministages{', offload' * run.offload}{', steps at the end' * run.late}"
        bench.row(f"a step with {name}", run.seconds, "s")
        bench.row(f"memory with {name}", run.nbytes / 1e3, "kB")
    bench.row("memory", many.nbytes / 1e3, "kB", against="one ministage", of=one.nbytes / 1e3, less=True)
    bench.row(
        "memory, both with offload", offloaded.nbytes / 1e3, "kB", against="one ministage",
        of=one_offloaded.nbytes / 1e3, less=True, least=1 / (1 - LESS),
    )  # fmt: skip
    bench.row("seconds", many.seconds, "s", against="one ministage", of=one.seconds, less=True, least=1 / SLOWER)
    bench.row("memory with offload", offloaded.nbytes / 1e3, "kB", against="without", of=many.nbytes / 1e3, less=True)
    bench.row(
        "seconds with offload", offloaded.seconds, "s", against="without", of=many.seconds, less=True,
        least=1 / (1 + OFFLOAD),
    )  # fmt: skip
    bench.row(
        "gradients, steps interleaved", many.gradients / 1e3, "kB", against="at the end", of=late.gradients / 1e3,
        less=True,
    )  # fmt: skip


def run_ministages(bench: Bench, run: MinistageRun, microbatches: int) -> MinistageRun:
    """Run two steps, and return what came of the second; `microbatches` of each rank."""
    plan = plan_ministages(run, microbatches)
    found = play_ranks(_play_rank, [(plan, run, microbatches)] * (STAGES * RANKS), TIMEOUT_S)
    seconds = max(of[1] for of in found) - min(of[0] for of in found)
    made = replace(run, seconds=seconds, nbytes=max(of[2] for of in found), gradients=max(of[3] for of in found))
    bench.say(f"{made}")
    return made


def plan_ministages(run: MinistageRun, microbatches: int) -> dict[str, Any]:
    """Simulate, and return the plan's contents; a border's transfer fits under a ministage's forward."""
    v = run.ministages
    parts = STAGES * v
    each = LAYERS // parts
    sizes = PartBytes(
        each * PARAMETERS, each * PARAMETERS, each * PARAMETERS / RANKS, each * PARAMETERS / RANKS,
        2 * each * PARAMETERS / RANKS, each * BORDER, each * BORDER,
    )  # fmt: skip
    took = PassSeconds(each * FORWARD_S, each * BACKWARD_S, 0.0)
    stages = tuple(
        PipelineStage(
            tuple(
                PipelineDevice(
                    f"s{s}d{i}", tuple(range(i, RANKS * microbatches, RANKS)), (took,) * v, (), (sizes,) * v,
                    COPY_BYTE_S,
                )
                for i in range(RANKS)
            ),
            (0.001,) * v,
            (0.001,) * v,
        )
        for s in range(STAGES)
    )  # fmt: skip
    pipeline = SimulatedPipeline(
        ScheduleName.BREADTH_FIRST, stages, (1.0,) * (parts - 1), lambda _, __: Route(0.001, ()), v, v == 1, run.offload
    )
    return spell_plan(pipeline, simulate(pipeline), range(0, LAYERS + 1, each), 1, recompute=True)


def _play_rank(plan: dict[str, Any], run: MinistageRun, microbatches: int) -> tuple[float, float, float, float]:
    """Return when the second step began and ended, and the bytes at its peaks: in all, and of gradients."""
    pipe = Pipeline(
        lambda: (WideLayer() for _ in range(LAYERS)),
        plan,
        loss=lambda output, targets: (output - targets).square().sum(),
        optimizer=lambda part: torch.optim.AdamW(part.parameters(), lr=1e-3),
        max_grad_norm=1.0 if run.late else None,
        collective_s=TIMEOUT_S / 2,
        emulate=EmulatedDevice(copy_gbit=1 / (COPY_BYTE_S * GBIT_BYTES)),
    )
    batch = torch.ones(RANKS * microbatches, ROWS, WIDTH)
    for _ in range(2):  # the first makes the optimizers' states
        dist.barrier()
        begin_s = time.monotonic()
        pipe.step((batch, 0 * batch))
        end_s = time.monotonic()
    memory = pipe.memory
    pipe.close()
    return begin_s, end_s, memory.peak_bytes, memory.peaks[MemoryCategory.GRADIENTS]
