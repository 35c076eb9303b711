"""Two ranks of one thread that compute: measured as `dips profile` does, planned, run, and held against the plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Bench, play_ranks
from benchmarks.pipeline_rank import TIMEOUT_S, spell_plan
from dips.commands.profile import SAMPLES, fit_line, measure_layers
from dips.inside.pipeline import Pipeline
from dips.inside.planning.profile import parse_model, parse_profile
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.search import PipelineChoice, Planner

HIDDEN, BLOCKS, BYTES, TOKENS, BATCH = 512, 8, 256, 64, 24
NEAR = 25.0  # % off the simulator
PLANS = {  # schedule, samples of a micro-batch, ministages
    "compact_zb": (ScheduleName.COMPACT_ZB, 4, 1),
    "1f1b": (ScheduleName.ONE_F_ONE_B, 4, 1),
    "breadth_first × 2": (ScheduleName.BREADTH_FIRST, 4, 2),
}


class RealBlock(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class RealDecoder(nn.Module):
    """The layers of `build` as one module, which `dips profile` measures."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(BYTES, HIDDEN), nn.Linear(HIDDEN, BYTES)
        self.blocks = nn.ModuleList(RealBlock() for _ in range(BLOCKS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers in their order."""
        return [self.embedding, *self.blocks, self.head]


def compare_real(bench: Bench) -> None:
    """Seconds of a step of real layers, beside those that are simulated from what each rank measured of them."""
    planner = plan_ranks(play_ranks(_measure, [()] * 2, TIMEOUT_S))
    groups = tuple((device,) for device in planner.devices)
    for name, (schedule, samples, ministages) in PLANS.items():
        cuts = planner.cut_layers(groups, ministages, samples)
        assert cuts is not None
        choice, prediction = planner.finish(PipelineChoice(schedule, groups, cuts, samples, ministages))
        plan = spell_plan(planner.make_pipeline(choice), prediction, cuts, samples)
        found = play_ranks(_play, [(plan, 3 if bench.quick else 7)] * 2, TIMEOUT_S)
        steps = [tuple(zip(*of_ranks, strict=True)) for of_ranks in zip(*found, strict=True)]
        took = median(max(ends) - min(begins) for begins, ends in steps)
        off = 100 * abs(took / prediction.seconds - 1)
        bench.say(f"real layers, {name}: {took:.3f} s for {prediction.seconds:.3f}")
        bench.row(f"real layers, {name}: off the simulator", off, "%", against="a bar", of=NEAR, least=1.0, less=True)
    bench.note(f"two ranks of one thread, {BLOCKS} feed-forward layers of {HIDDEN}, measured by `dips profile` on both")


def plan_ranks(rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> Planner:
    """Return the planner for two devices, each of the kind that it was measured to be."""
    kinds = [f"core-{i}" for i in range(len(rows))]
    profile = parse_profile(
        {
            "nodes": [{"name": kind, "kind": kind} for kind in kinds],
            "kinds": {kind: {"memory_gb": 1000, "tflops": 1} for kind in kinds},
            "links": {"site": {"site": 10}},
            "measured": {
                kind: {
                    layer: {
                        op: fit_line(SAMPLES, [seconds[k] for seconds in row["seconds"]])
                        for k, op in enumerate(("forward", "input", "weight"))
                    }
                    for layer, row in found.items()
                }
                for kind, found in zip(kinds, rows, strict=True)
            },
        },
        "two ranks",
    )
    needs = ("parameters", "flops", "activation_bytes", "border_bytes")
    layers = [{"name": layer, **{key: row[key] for key in needs}} for layer, row in rows[0].items()]
    model = parse_model({"name": "real", "batch": BATCH, "sequence": TOKENS, "layers": layers}, "real")
    return Planner(profile, replace(model, recompute=False))


def _measure() -> dict[str, dict[str, Any]]:
    dist.barrier()  # both at the same time, as they compute later
    return measure_layers(RealDecoder(), torch.device("cpu"), TOKENS)


def _play(plan: dict[str, Any], steps: int) -> list[tuple[float, float]]:
    """Return begin and end of each step."""
    pipe = Pipeline(
        lambda: RealDecoder().layers,
        plan,
        loss=lambda output, targets: nn.functional.cross_entropy(
            output.flatten(0, 1), targets.flatten(), reduction="sum"
        ),
        optimizer=lambda part: torch.optim.SGD(part.parameters(), lr=0.01),
        collective_s=TIMEOUT_S / 2,
    )
    torch.manual_seed(0)
    tokens, found = torch.randint(BYTES, (BATCH, TOKENS + 1)), []
    for _ in range(steps + 1):
        dist.barrier()
        begin_s = time.monotonic()
        pipe.step((tokens[:, :-1], tokens[:, 1:]))
        found.append((begin_s, time.monotonic()))
    pipe.close()
    return found[1:]  # the first step makes connections and buffers
