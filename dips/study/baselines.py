"""Baselines of the asynchronous outer loop: one process group, synchronous clusters, and other asynchronous loops.

All train the same model on the same clusters' batches, with as many tokens and the same schedule. With outer steps the
schedule follows these, since a warm-up that ends within the first round costs synchronous DiLoCo 10 % of its loss.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import ceil
from random import Random

import numpy as np
import numpy.typing as npt
import torch

from dips.outer import reference
from dips.outer_step import nesterov_numbers
from dips.slave.ports import F32
from dips.study.fleet import Fleet
from dips.study.learner import Inner, LastRounds, Recipe, fill, flatten
from dips.study.task import BatchDraw, Task, make_model


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """The results of a baseline."""

    loss: float  # of the mean of θ at the ends of the last rounds
    first_loss: float
    tokens: int
    steps: int  # optimizer steps of each worker, or of the fastest
    lasted_s: float  # duration in virtual time, without transfers
    effective_clusters: float  # 1/Σshare², by their shares of the tokens
    versions: int = 0  # outer steps
    cosine: float = 0.0  # mean cosine of an outer step's gradient to the momentum before it


def train_data_parallel(task: Task, fleet: Fleet, recipe: Recipe, steps: int, seed: int) -> BaselineResult:
    """Train on all clusters' batches in each step of one optimizer, as one process group would; `steps` counts all
    clusters'.
    """
    workers, first = begin_workers(task, fleet, recipe, seed)
    worker, clusters = workers[0], len(workers)
    rounds, last = steps // clusters, LastRounds(steps // clusters * clusters, fleet)
    for step in range(rounds):
        worker.train_on([w.draw_batch() for w in workers], step / rounds)
        if last.is_due((step + 1) * clusters):
            last.note((step + 1) * clusters, {0: flatten(worker.parameters)})
    slowest_s = max(member.step_s for member in fleet.members)
    loss = _validate(task, worker, last, flatten(worker.parameters))
    return BaselineResult(loss, first, rounds * clusters * task.tokens, rounds, rounds * slowest_s, clusters)


def train_synchronous(
    task: Task, fleet: Fleet, recipe: Recipe, steps: int, seed: int, lr: float, momentum: float, parallel: float = 0.0
) -> BaselineResult:
    """Train by DiLoCo (Douillard et al., Algorithm 1): H steps of every cluster, then one Nesterov step of their mean.

    parallel  share of the run that is first data parallel; with lr 1 and momentum 0 it is post-local SGD (Lin et al.)
    """
    workers, first = begin_workers(task, fleet, recipe, seed)
    clusters, inner_steps = len(workers), fleet.inner_steps
    together = train_together(workers, steps, parallel)
    theta = flatten(workers[0].parameters)
    rounds = ceil((steps // clusters - together) / inner_steps)  # no fewer tokens than Di-PS, which ends likewise
    total_steps, outer = together + rounds * inner_steps, _Outer(theta, lr, momentum)
    last = LastRounds(total_steps * clusters, fleet)
    for number in range(rounds):
        progress = (together + number * inner_steps) / total_steps  # as with Di-PS: known at outer steps only
        mean = np.zeros_like(theta)
        for worker in workers:
            fill(worker.parameters, outer.theta)
            for _ in range(inner_steps):
                worker.take_step(progress)
            mean += outer.theta - flatten(worker.parameters)
        outer.take_step(mean, 1.0 / clusters)
        last.note((together + (number + 1) * inner_steps) * clusters, {0: outer.theta})
    slowest_s = max(member.step_s for member in fleet.members)
    return BaselineResult(
        _validate(task, workers[0], last, outer.theta), first, total_steps * clusters * task.tokens, total_steps,
        total_steps * slowest_s, clusters, rounds, outer.mean_cosine,
    )  # fmt: skip


def train_naive(
    task: Task, fleet: Fleet, recipe: Recipe, steps: int, seed: int, lr: float, momentum: float, realigned: bool = False
) -> BaselineResult:
    """Train asynchronously: each push is a whole Nesterov step of its difference to its own base.

    realigned  whether each tensor of a push is first brought into line with the outer momentum (HeLoCo)
    """
    workers, first = begin_workers(task, fleet, recipe, seed)
    outer, inner_steps = _Outer(flatten(workers[0].parameters), lr, momentum), fleet.inner_steps
    rng, bases = Random(f"{seed}/naive"), [outer.theta] * len(workers)
    tensors = np.cumsum([p.numel() for p in workers[0].parameters.values()])[:-1]
    taken, now = [0] * len(workers), 0.0
    last = LastRounds(steps, fleet)
    due = [(inner_steps * _draw_step_s(fleet, i, rng), i) for i in range(len(workers))]
    heapq.heapify(due)
    for _ in range(ceil(steps / inner_steps)):
        now, i = heapq.heappop(due)
        for _ in range(inner_steps):
            workers[i].take_step(sum(taken) / steps)
        taken[i] += inner_steps
        push = bases[i] - flatten(workers[i].parameters)
        outer.take_step(realign(push, outer.momentum, tensors) if realigned else push, 1.0)
        bases[i] = outer.theta
        last.note(sum(taken), {0: outer.theta})
        fill(workers[i].parameters, outer.theta)
        heapq.heappush(due, (now + inner_steps * _draw_step_s(fleet, i, rng), i))
    return BaselineResult(
        _validate(task, workers[0], last, outer.theta), first, sum(taken) * task.tokens, max(taken), now,
        sum(taken) ** 2 / sum(each**2 for each in taken), sum(taken) // inner_steps, outer.mean_cosine,
    )  # fmt: skip


# HeLoCo (arXiv 2606.00271) has these five numbers, but we had no text with their values. These are of our own choice.
IN_LINE = 0.2  # cosine with the momentum from which a tensor is left as it is
SHRINKAGE, MOST_SHRINKAGE = 1.0, 1.0  # of what points against the momentum
TURN = 0.5  # of a tensor that is neither against the momentum nor in line with it
DOUBT = 1.0  # weight of the momentum's norm beside the push's: a small push is hardly corrected


def realign(push: F32, momentum: F32, ends: npt.NDArray[np.int64]) -> F32:
    """Return a push whose tensors, which end at `ends`, are brought into line with the outer momentum (HeLoCo).

    A tensor in line with it stays. One that points against it loses a part of what does so. One between is turned
    towards it and keeps its length.
    """
    made = [_realign_tensor(d, m) for d, m in zip(np.split(push, ends), np.split(momentum, ends), strict=True)]
    return np.concatenate(made)


def _realign_tensor(push: F32, momentum: F32) -> F32:
    length, ahead = float(np.linalg.norm(push)), float(np.linalg.norm(momentum))
    if not length or not ahead:
        return push
    towards, cosine = momentum / ahead, float(push @ momentum) / (length * ahead)
    sure = length / (length + DOUBT * ahead)
    if cosine >= IN_LINE:
        return push
    if cosine < 0:
        return push - min(-SHRINKAGE * cosine * sure, MOST_SHRINKAGE) * cosine * length * towards
    turn = TURN * (1.0 - cosine / IN_LINE) * sure
    turned: F32 = (1.0 - turn) * push / length + turn * towards
    turned *= length / float(np.linalg.norm(turned))
    return turned


class _Outer:
    """The outer parameters θ and m, with the Nesterov step of the project's reference."""

    def __init__(self, theta: F32, lr: float, momentum: float) -> None:
        self.theta, self.momentum, self._lr, self._coefficient = theta, np.zeros_like(theta), lr, momentum
        self._cosines: list[float] = []

    @property
    def mean_cosine(self) -> float:
        return sum(self._cosines) / len(self._cosines) if self._cosines else 0.0

    def take_step(self, total: F32, scale: float) -> None:
        """Take the step of scale·total; `total` becomes the momentum."""
        norms = float(np.linalg.norm(total)) * float(np.linalg.norm(self.momentum))
        if norms > 0:
            self._cosines.append(float(total @ self.momentum) / norms)
        after = np.empty_like(self.theta)
        reference.apply(self.theta, total, self.momentum, scale, self._lr, nesterov_numbers(self._coefficient), after)
        self.theta, self.momentum = after, total


def begin_workers(task: Task, fleet: Fleet, recipe: Recipe, seed: int) -> tuple[list[Inner], float]:
    """Return one worker per cluster, all at the same θ, and the loss of this θ."""
    torch.set_num_threads(1)
    clusters = len(fleet.members)
    workers = [
        Inner(task, recipe, BatchDraw(seed, number, clusters), make_model(task, seed)) for number in range(clusters)
    ]
    return workers, task.validate(make_model(task, seed))  # not a worker's: `validate` may leave it in eval mode


def train_together(workers: list[Inner], steps: int, share: float) -> int:
    """Train data parallel for a share of a run of so many `steps` of all workers; return the steps of each.

    All of them then have the parameters and the optimizer state of the first, and their own batches.
    """
    first, *others = workers
    together = int(share * (steps // len(workers)))
    for step in range(together):
        first.train_on([w.draw_batch() for w in workers], step * len(workers) / steps)
    for worker in others if together else ():
        fill(worker.parameters, flatten(first.parameters))
        worker.copy_optimizers(first)
    return together


def _validate(task: Task, worker: Inner, last: LastRounds, theta: F32) -> float:
    """Return the validation loss of the last rounds; `theta` is that of the run's end."""
    fill(worker.parameters, last.mean({0: theta})[0])
    return task.validate(worker.model)


def _draw_step_s(fleet: Fleet, cluster: int, rng: Random) -> float:
    member = fleet.members[cluster]
    return member.step_s * (1.0 - member.jitter / 2 + member.jitter * rng.random())
