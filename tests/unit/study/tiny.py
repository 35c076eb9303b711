"""A task that trains in milliseconds: the tests' own factory, and settings for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dips.study.fleet import Fleet, FleetCluster
from dips.study.learner import Recipe
from dips.study.task import Batch, BatchDraw, Task

WORDS, WIDTH, TOKENS = 12, 8, 32
TINY = Recipe(lr=2e-2)
FACTORY = f"{__name__}:build"


def build(scale: float = 1.0) -> Task:
    """The next of twelve words is three further on: learned in a few dozen steps."""

    def make_model() -> nn.Module:
        model = nn.Sequential(
            nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS, bias=False)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= scale
        return model

    def draw_batches(draw: BatchDraw) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(draw.seed * 1000 + draw.cluster)
        while True:
            yield _with_targets(torch.randint(WORDS, (TOKENS,), generator=generator))

    def validate(model: nn.Module) -> float:
        with torch.no_grad():
            return float(_loss(model, _with_targets(torch.arange(WORDS))))

    return Task(make_model, draw_batches, _loss, validate, TOKENS)


def not_a_task() -> int:
    return 7


def breaks() -> Task:
    def draw_batches(draw: BatchDraw) -> Iterator[Batch]:
        yield from ()

    whole = build()
    return Task(whole.make_model, draw_batches, whole.loss, whole.validate, TOKENS)


class OddError(Exception):
    """Cannot be unpickled: its constructor takes more than its text."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} is odd: {why}")


def misbehaves(how: str = "") -> Task:
    """The task, whose batches end in this way."""
    whole = build()

    def draw_batches(draw: BatchDraw) -> Iterator[Batch]:
        match how:
            case "odd":
                raise OddError("it", "so")
            case "attribute":
                whole.nothing  # type: ignore[attr-defined]  # noqa: B018
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        yield from whole.draw_batches(draw)

    return Task(whole.make_model, draw_batches, whole.loss, whole.validate, TOKENS)


def fleet(*times: float, pace: str = "steps", inner_steps: int = 4, **keys: Any) -> Fleet:
    """Clusters whose inner steps take so long; `keys` of each."""
    return Fleet(tuple(FleetCluster(t, **keys) for t in times), inner_steps, pace)


def _with_targets(words: Tensor) -> Batch:
    return words, (words + 3) % WORDS


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
