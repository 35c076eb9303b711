"""What an asynchronous outer loop is compared with: one process group, and clusters that wait for each other.

Both train the same models on the same clusters' batches, with the same number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dips.demo.data import load_corpus
from dips.demo.model import Decoder
from dips.outer import reference
from dips.outer_step import nesterov_numbers
from dips.sim.scenario import NAMES
from dips.slave.ports import F32
from dips.study.learner import BatchDraws, Inner, Recipe, validation_loss


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """What came of a baseline."""

    loss: float  # nats per byte
    tokens: int
    steps: int  # of the optimizer, by each worker


def train_data_parallel(recipe: Recipe, clusters: int, tokens: int, seed: int) -> BaselineResult:
    """All clusters' batches in each step of one optimizer, as one process group would."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    corpus, first = load_corpus(seed), Decoder(recipe.shape).state_dict()
    draws = [BatchDraws(corpus, recipe, seed, name) for name in NAMES[:clusters]]
    worker = Inner(recipe, draws[0], first)
    steps = tokens // (clusters * recipe.tokens)
    for step in range(steps):
        worker.train_on(torch.cat([draw.draw() for draw in draws]), step / steps)
    return BaselineResult(validation_loss(worker.model, corpus, recipe), steps * clusters * recipe.tokens, steps)


def train_synchronous(
    recipe: Recipe, clusters: int, inner_steps: int, tokens: int, seed: int, lr: float = 0.7, momentum: float = 0.8
) -> BaselineResult:
    """DiLoCo (Douillard et al., Algorithm 1): every cluster takes H steps, then one Nesterov step of their mean."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    corpus, first = load_corpus(seed), Decoder(recipe.shape).state_dict()
    workers = [Inner(recipe, BatchDraws(corpus, recipe, seed, name), first) for name in NAMES[:clusters]]
    theta = _flatten(workers[0])
    velocity, rounds = np.zeros_like(theta), tokens // (clusters * inner_steps * recipe.tokens)
    for number in range(rounds):
        total = np.zeros_like(theta)
        for worker in workers:
            _fill(worker, theta)
            for step in range(inner_steps):
                worker.take_step((number + step / inner_steps) / rounds)
            total += theta - _flatten(worker)
        after = np.empty_like(theta)
        reference.apply(theta, total, velocity, 1.0 / clusters, lr, nesterov_numbers(momentum), after)
        theta, velocity = after, total
    _fill(workers[0], theta)
    steps = rounds * inner_steps
    return BaselineResult(validation_loss(workers[0].model, corpus, recipe), steps * clusters * recipe.tokens, steps)


def _flatten(worker: Inner) -> F32:
    return torch.cat([p.detach().reshape(-1) for p in worker.model.parameters()]).numpy()


def _fill(worker: Inner, theta: F32) -> None:
    with torch.no_grad():
        rest = torch.from_numpy(theta)
        for parameter in worker.model.parameters():
            head, rest = rest[: parameter.numel()], rest[parameter.numel() :]
            parameter.copy_(head.view(parameter.shape))
