"""Plays what `dips plan cluster --for` writes: torch's pipelining runtime a CSV, Megatron-core a layout."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import play_ranks
from dips.inside.planning.plan import Framework, hand_over, make_plan
from dips.inside.planning.profile import ClusterProfile, ModelProfile, parse_model, parse_profile

WIDTH, BLOCKS, TIMEOUT_S = 16, 6, 120


def make_case(speeds: Sequence[float], batch: int) -> tuple[ClusterProfile, ModelProfile]:
    """Return single devices of these speeds on fast links, and a decoder of six blocks."""
    profile = parse_profile(
        {
            "nodes": [{"name": f"n{i}", "kind": f"k{i}"} for i in range(len(speeds))],
            "kinds": {f"k{i}": {"memory_gb": 24, "tflops": speed} for i, speed in enumerate(speeds)},
            "links": {"site": {"site": 50}},
        },
        "case",
    )
    shape = {"blocks": BLOCKS, "hidden": 1024, "ffn": 4096, "vocab": 2048}
    return profile, parse_model({"name": "case", "batch": batch, "sequence": 512, "transformer": shape}, "case")


def play_csv(speeds: Sequence[float], batch: int) -> tuple[float, list[int]]:
    """Play a plan's CSV by gloo ranks; return the worst relative error of a gradient, and the layers of each part."""
    plan = make_plan(*make_case(speeds, batch), Framework.TORCHTITAN)
    handed, choice = hand_over(plan, Framework.TORCHTITAN), plan.best.choice
    assert choice is not None
    with tempfile.TemporaryDirectory() as directory:
        csv = Path(directory) / "schedule.csv"
        csv.write_text(handed.csv)
        given = (str(csv), choice.cuts, batch // choice.samples)
        worst = max(play_ranks(_play_rank, [given] * len(choice.groups), TIMEOUT_S))
    return worst, [b - a for a, b in zip(choice.cuts, choice.cuts[1:], strict=False)]


def _make_layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def _sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


def _play_rank(csv: str, cuts: Sequence[int], microbatches: int) -> float:
    """One rank: its parts of the model, the whole schedule, its gradients against one process."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    layers, parts = _make_layers(cuts[-1]), len(cuts) - 1
    mine = range(dist.get_rank(), parts, dist.get_world_size())
    own = {part: nn.Sequential(*layers[cuts[part] : cuts[part + 1]]) for part in mine}
    stages = [PipelineStage(module, part, parts, torch.device("cpu")) for part, module in own.items()]
    schedule = _PipelineScheduleRuntime(stages, microbatches, loss_fn=_sum_of_squares, scale_grads=False)
    schedule._load_csv(csv)
    torch.manual_seed(1)
    inputs, target = torch.randn(2 * microbatches, WIDTH).double(), torch.randn(2 * microbatches, WIDTH).double()
    last: dict[str, Any] = {"target": target, "losses": []} if parts - 1 in own else {}
    schedule.step(*((inputs,) if 0 in own else ()), **last)
    alone = _make_layers(cuts[-1])
    _sum_of_squares(nn.Sequential(*alone)(inputs), target).backward()
    worst = 0.0
    for part, module in own.items():
        wanted = [p for layer in alone[cuts[part] : cuts[part + 1]] for p in layer.parameters()]
        for parameter, want in zip(module.parameters(), wanted, strict=True):
            assert parameter.grad is not None and want.grad is not None
            worst = max(worst, float((parameter.grad - want.grad).abs().max() / want.grad.abs().max()))
    return worst


def read_layout(speeds: Sequence[float], batch: int) -> tuple[list[int], list[int]]:
    """Return the blocks of each stage, as planned and as Megatron-core reads the layout."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    plan = make_plan(*make_case(speeds, batch), Framework.MEGATRON)
    flags = dict(flag.lstrip("-").split("=", 1) for flag in hand_over(plan, Framework.MEGATRON).flags)
    size = int(flags["pipeline-model-parallel-size"])
    layout = PipelineParallelLayerLayout(flags["pipeline-model-parallel-layout"], size)
    layout.validate_layer_layout(BLOCKS, 0)
    read = [sum(row.count(LayerType.decoder) for row in rank) for rank in layout.layout]
    blocks = range(1, BLOCKS + 1)  # between embedding and head
    return [sum(i in blocks for a, b in stage.layers for i in range(a, b)) for stage in plan.stages], read
