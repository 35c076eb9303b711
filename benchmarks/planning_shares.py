"""Two ranks of configs/examples/unequal_gpus.py whose layers are slept: unequal shares beside equal ones."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import play_ranks
from benchmarks.pipeline_rank import Slow
from benchmarks.record import ROOT

BLOCKS, WIDTH, BYTES, TIMEOUT_S = 4, 16, 256, 120
Share = tuple[int, int]


class SleptBlock(nn.Module):
    """A layer whose forward takes `sample_s` for each sample of its micro-batch, and its backward twice that."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.sample_s, self.weight = sample_s, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = self.sample_s * len(x)
        return x + Slow.apply(self.weight(x), seconds, 2 * seconds)


class SleptDecoder(nn.Module):
    """What the example trains, in its own seconds: `layers` of i64[samples, T] to logits of bytes."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.layers = nn.ModuleList(SleptBlock(sample_s) for _ in range(BLOCKS))
        self.output = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def play_shares(
    sample_s: Sequence[float], shares: Mapping[str, Sequence[Share]], steps: int
) -> dict[str, tuple[float, float]]:
    """Train by each of some shares in turn, a rank for each device.

    sample_s  seconds of a layer's forward for one sample, of each rank
    shares    by a name: of each rank, its samples of a step and the micro-batches that they are cut into
    Returns   by name: median seconds of a step, and the loss of the last
    """
    given = [(seconds, dict(shares), steps) for seconds in sample_s]
    found = play_ranks(_play_rank, given, TIMEOUT_S, start="spawn")
    return {
        name: (
            median(max(took) for took in zip(*(of[name][0] for of in found), strict=True)),
            sum(of[name][1] for of in found),
        )
        for name in shares
    }


def _play_rank(sample_s: float, shares: dict[str, Sequence[Share]], steps: int) -> dict[str, tuple[list[float], float]]:
    """Return the seconds of each step and the loss of the last, by the shares' name."""
    spec = importlib.util.spec_from_file_location("unequal_gpus", ROOT / "configs" / "examples" / "unequal_gpus.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = {}
    for name, of in shares.items():
        torch.manual_seed(0)
        model = example.shard(SleptDecoder(sample_s), of)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = (torch.arange(sum(n for n, _ in of))[:, None] + torch.arange(9)) % BYTES
        took, loss = [], 0.0
        for _ in range(steps + 1):
            dist.barrier()
            begun = time.perf_counter()
            loss = float(example.compute_gradients(model, batch, of, dist.get_rank()))
            optimizer.step()
            optimizer.zero_grad()
            took.append(time.perf_counter() - begun)
        found[name] = took[1:], loss  # the first step makes buffers
    return found
