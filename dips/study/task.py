"""The task of a study: a model, batches for each cluster, and the loss by which methods are compared.

`factory: MODULE:FUNCTION` of a study gives a function that returns a Task. The study makes the model once for each
worker, under a seed; the rest is up to the task. Equal seeds must give equal batches: a study compares paired seeds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dips.client.parallel.factory import find_function
from dips.errors import ConfigError

Batch = tuple[Tensor, Tensor]  # inputs and targets
OPTION = "factory"


@dataclass(frozen=True, slots=True)
class BatchDraw:
    """Identifies a stream of batches: the run's seed, and the cluster among all."""

    seed: int
    cluster: int
    clusters: int
    stream: str = ""  # differs after a restart of the same cluster


@dataclass(frozen=True, slots=True)
class Task:
    """The value that the factory returns."""

    make_model: Callable[[], nn.Module]  # its parameters in fp32, drawn from torch's generator
    draw_batches: Callable[[BatchDraw], Iterator[Batch]]  # without end
    loss: Callable[[nn.Module, Batch], Tensor]  # the training loss, a mean over the batch
    validate: Callable[[nn.Module], float]  # the loss on data of no cluster, by which methods are compared
    tokens: int  # tokens in a batch, which is one inner step of a cluster
    unit: str = "nats"


def load_task(spec: str, arguments: Mapping[str, Any]) -> Task:
    """Call MODULE:FUNCTION with `arguments`. Raises ConfigError unless it returns a Task."""
    function = find_function(spec, OPTION)
    try:
        made = function(**arguments)
    except TypeError as error:
        taken = ", ".join(inspect.signature(function).parameters) or "nothing"
        raise ConfigError(
            f"{OPTION} {spec}: cannot be called with `task: {dict(arguments)}`: {error}; it takes {taken}"
        ) from error
    if not isinstance(made, Task):
        raise ConfigError(f"{OPTION} {spec}: expected a dips.study.task.Task, got {type(made).__name__}")
    if made.tokens < 1:
        raise ConfigError(f"{OPTION} {spec}: Task.tokens: expected at least 1 token a batch, got {made.tokens}")
    return made


def make_model(task: Task, seed: int) -> nn.Module:
    """Return the model with which every worker begins. Raises ConfigError if it cannot be shared."""
    torch.manual_seed(seed)
    model = task.make_model()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(f"{OPTION}: the model has no parameter that requires a gradient")
    wrong = [f"{name} is {p.dtype}" for name, p in trained if p.dtype is not torch.float32]
    if wrong:
        raise ConfigError(f"{OPTION}: expected parameters in torch.float32; {wrong[0]}")
    return model
