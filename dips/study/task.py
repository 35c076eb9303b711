"""What a study trains: a model, batches for each cluster, and the loss that tells how good it is.

`factory: MODULE:FUNCTION` of a study names a function that returns a Task. The study calls the model's maker once for
each worker, under a seed; all else is the task's own. Same seed, same batches: a study is compared by paired seeds.
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

Batch = tuple[Tensor, Tensor]  # what the model is given, and what it is to answer
OPTION = "factory"


@dataclass(frozen=True, slots=True)
class BatchDraw:
    """Whose batches: the run's seed, and the cluster among all."""

    seed: int
    cluster: int
    clusters: int
    stream: str = ""  # differs where the same cluster begins anew: after a restart


@dataclass(frozen=True, slots=True)
class Task:
    """What the factory returns."""

    make_model: Callable[[], nn.Module]  # its parameters in fp32, drawn from torch's generator
    draw_batches: Callable[[BatchDraw], Iterator[Batch]]  # without end
    loss: Callable[[nn.Module, Batch], Tensor]  # the mean over the batch: what is trained
    validate: Callable[[nn.Module], float]  # of text that no cluster has: what methods are compared by
    tokens: int  # of a batch: an inner step of a cluster
    unit: str = "nats"


def load_task(spec: str, arguments: Mapping[str, Any]) -> Task:
    """Call MODULE:FUNCTION with `arguments`; raise ConfigError unless it returns a Task whose model can be trained."""
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
    """The model as every worker begins with it; raise ConfigError if it cannot be shared."""
    torch.manual_seed(seed)
    model = task.make_model()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(f"{OPTION}: the model has no parameter that requires a gradient")
    wrong = [f"{name} is {p.dtype}" for name, p in trained if p.dtype is not torch.float32]
    if wrong:
        raise ConfigError(f"{OPTION}: expected parameters in torch.float32; {wrong[0]}")
    return model
