"""Real models in simulated clusters: an inner step is forward, backward and optimizer on one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dips.errors import ConfigError
from dips.ids import PushId
from dips.protocol.enums import LayerUnit
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import Manifest
from dips.protocol.options import FORBID
from dips.sim.scenario import Site
from dips.slave.ports import F32
from dips.study.fleet import Arrays, Fault, Fleet
from dips.study.task import Batch, BatchDraw, Task, make_model
from dips.wire.chunks import LayerLayout

# ---- optimizers -----------------------------------------------------------------------------------------------------


BETAS = (0.9, 0.95)  # of AdamW
DECAY = 0.1
MUON_MOMENTUM = 0.95


def make_optimizers(name: str, model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step together. Raises ConfigError for an unknown name."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"inner.optimizer: expected {' or '.join(OPTIMIZERS)}, got {name!r}")
    return OPTIMIZERS[name](model, lr)


def _make_adamw(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    return [_adamw([p for p in model.parameters() if p.requires_grad], lr)]


def _make_muon(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the inner matrices, and AdamW for embeddings, output and vectors, both with the same rate.

    Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`), so one learning rate and decay serve both.
    """
    inside, rest = split_matrices(model)
    if not inside:
        raise ConfigError("inner.optimizer: muon trains matrices, and the model has none inside; take adamw")
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"inner.optimizer: muon needs torch 2.9 or newer; this is {torch.__version__}")
    muon = torch.optim.Muon(inside, lr=lr, weight_decay=DECAY, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
    return [muon, _adamw(rest, lr)] if rest else [muon]


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the inner matrices, and the rest: vectors, embeddings, and outputs with a row for each embedded word."""
    words = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    inside = [p for p in trained if p.dim() == 2 and p.shape[0] not in words]
    ids = set(map(id, inside))
    return inside, [p for p in trained if id(p) not in ids]


def _adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=DECAY, fused=True)


OPTIMIZERS: Mapping[str, Callable[[nn.Module, float], list[torch.optim.Optimizer]]] = {
    "adamw": _make_adamw,
    "muon": _make_muon,
}


# ---- learner --------------------------------------------------------------------------------------------------------
# Real models in simulated clusters: an inner step is forward, backward and optimizer on one of the cluster's batches.
#
# Optimizer state stays in the cluster, as in a real run. Equal seeds give equal bits: torch is single-threaded, and
# time has no effect. A cluster's parameters are views of its simulated rank's memory: nothing is copied between the
# two.


LEAST_LR = 0.1  # end of the cosine, as a share of the peak
LEAST_START = 0.25  # share of the peak: progress is 0 until the first version; a tiny norm would set a tiny hard cap


@dataclass(frozen=True, slots=True)
class Recipe:
    """The optimizer and schedule of the inner steps, the same in every method."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    lr: float = 4e-3  # peak
    optimizer: str = "adamw"
    warmup: float = 0.02  # share of the run's tokens
    clip: float = 1.0  # of the inner gradient's norm

    def __post_init__(self) -> None:
        for key, holds, expected in (
            ("lr", self.lr > 0, "a number above 0"),
            ("optimizer", self.optimizer in OPTIMIZERS, " or ".join(OPTIMIZERS)),
            ("warmup", 0 <= self.warmup < 1, "a share, 0 to 1"),
            ("clip", self.clip > 0, "a number above 0"),
        ):
            if not holds:
                raise ConfigError(f"inner.{key}: expected {expected}, got {getattr(self, key)!r}")

    def rate(self, progress: float) -> float:
        """Return the learning rate at this share of the run's tokens: linear warm-up, then a cosine."""
        if progress < self.warmup:
            return self.lr * max(progress / self.warmup, LEAST_START)
        along = (progress - self.warmup) / (1.0 - self.warmup)
        return self.lr * (LEAST_LR + (1.0 - LEAST_LR) * 0.5 * (1.0 + math.cos(math.pi * min(along, 1.0))))


class Inner:
    """One worker: a module, its optimizers and its batches."""

    def __init__(self, task: Task, recipe: Recipe, draw: BatchDraw, model: nn.Module) -> None:
        self.task, self.recipe, self.model = task, recipe, model
        self._batches = task.draw_batches(draw)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._trained = list(self.parameters.values())
        self.optimizers = make_optimizers(recipe.optimizer, model, recipe.lr)

    def copy_optimizers(self, other: Inner) -> None:
        """Take the state of another worker's optimizers, of a model of the same shape."""
        for mine, theirs in zip(self.optimizers, other.optimizers, strict=True):
            mine.load_state_dict(deepcopy(theirs.state_dict()))

    def go_on_from(self, other: Inner) -> None:
        """Take the state of another worker's optimizers, and its batches from where they are."""
        self.copy_optimizers(other)
        self._batches = other._batches

    def draw_batch(self) -> Batch:
        """Return the worker's next batch."""
        for batch in self._batches:
            return batch
        raise ConfigError("factory: Task.draw_batches: expected batches without end, and they ended; repeat the data")

    def take_step(self, progress: float) -> float:
        """Train on one batch; return its loss before the step."""
        return self.train_on([self.draw_batch()], progress)

    def train_on(self, batches: list[Batch], progress: float, lr_times: float = 1.0) -> float:
        """Train on the mean gradient of `batches`; return their mean loss before the step."""
        total = 0.0
        for parameter in self._trained:
            parameter.grad = None
        for batch in batches:
            loss = self.task.loss(self.model, batch) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self._trained, self.recipe.clip)
        rate = self.recipe.rate(progress) * lr_times
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        return total


@dataclass(slots=True)
class _Trained:
    """A cluster's worker during one attempt of its trainer."""

    attempt: int
    inner: Inner
    theta: Arrays  # the memory trained in place; identifies the worker, since a restarted agent counts attempts anew
    base: Arrays = field(default_factory=dict)  # the last pulled θ, kept if a fault may need it


class LearnedModel:
    """The model of a World (sim/work.py): a module for each cluster that has begun."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        seed: int,
        names: tuple[str, ...] = ("a",),
        faults: Mapping[str, Fault] | None = None,
        due: Mapping[str, float] | None = None,
        layers: LayerUnit = LayerUnit.BLOCK,
        begun: Sequence[Inner] = (),
        begun_share: float = 0.0,
    ) -> None:
        """Make the first θ; `faults` by cluster begin and end at shares of the inner steps that each is `due`.

        begun        the clusters' workers after a data-parallel beginning, from which each goes on
        begun_share  of the run that is over by then
        """
        self._task, self._recipe, self._seed, self._names = task, recipe, seed, names
        self._parallel, self._begun_share = dict(zip(names, begun, strict=False)), begun_share
        self._faults, self._due = dict(faults or {}), dict(due or {})
        first = begun[0].model if begun else make_model(task, seed)
        self._first = {n: p.detach().clone() for n, p in first.named_parameters() if p.requires_grad}
        self._state = {n: t.detach().clone() for n, t in first.state_dict().items()}
        shapes = [(name, tuple(p.shape)) for name, p in self._first.items()]
        self.manifest = Manifest.from_shapes(shapes, Grouping(layers))
        self._layout = LayerLayout(self.manifest, range(len(self.manifest.layers)))
        self._places = self._find_places()
        self.genesis: Arrays = {i: np.zeros(layer.numel, np.float32) for i, layer in enumerate(self.manifest.layers)}
        for name, view in self.views(self.genesis).items():
            view[:] = self._first[name].numpy().reshape(-1)
        self._trained: dict[str, _Trained] = {}
        self._begun: dict[str, int] = {}  # number of workers begun, by cluster
        self._spoils = {name: torch.Generator().manual_seed(seed) for name in self._faults}
        self.steps: dict[str, int] = {}  # by cluster
        self.bad_pushes: dict[str, list[PushId]] = {}  # by cluster, in order
        self.tokens = task.tokens

    # ---- SimModel --------------------------------------------------------------------------------------------------

    def draw_tokens(self, site: Site) -> int:
        return self.tokens

    def take_inner_step(self, site: Site, theta: Arrays, progress: float) -> float:
        inner, fault = self._trained[site.name].inner, self._present_fault(site.name)
        progress = self._begun_share + (1.0 - self._begun_share) * progress
        self.steps[site.name] = self.steps.get(site.name, 0) + 1
        if fault is None:
            return inner.take_step(progress)
        batch = fault.spoil_batch(inner.draw_batch(), self._spoils[site.name])
        return inner.train_on([batch], progress, fault.lr_times)

    def on_install(self, site: Site, attempt: int, theta: Arrays, pulled: Arrays) -> None:
        known = self._trained.get(site.name)
        if known is None or known.attempt != attempt or not _is_same(known.theta, theta):
            inner = self._begin_worker(site.name, theta)
            known = self._trained[site.name] = _Trained(attempt, inner, dict(theta))
        if site.name in self._faults:
            known.base = {layer: a.copy() for layer, a in pulled.items()}

    def prepare_push(self, site: Site, push: PushId, theta: Arrays) -> Arrays:
        fault = self._present_fault(site.name)
        if fault is None:
            return theta
        self.bad_pushes.setdefault(site.name, []).append(push)
        return fault.spoil_push(theta, self._trained[site.name].base)

    # ---- for the study ---------------------------------------------------------------------------------------------

    def views(self, theta: Mapping[int, F32]) -> dict[str, F32]:
        """Return each parameter by name, as a flat view into the layers."""
        return {name: theta[layer][where] for name, (layer, where) in self._places.items()}

    def evaluate(self, theta: Mapping[int, F32]) -> float:
        """Return the validation loss of θ, with the buffers of the first cluster, as the baselines have them."""
        model = self._make_model()
        if self._trained:  # a cluster with a fault may have spoilt its own
            first = min(self._trained, key=lambda name: (name in self._faults, self._names.index(name)))
            model.load_state_dict(self._trained[first].inner.model.state_dict())
        self._bind_parameters(model, {layer: a.copy() for layer, a in theta.items()})
        return self._task.validate(model)

    def _present_fault(self, cluster: str) -> Fault | None:
        fault = self._faults.get(cluster)
        return fault if fault is not None and fault.holds(self._share_of(cluster)) else None

    def is_mended(self, cluster: str) -> bool:
        """Return whether the cluster had a fault that is over."""
        fault = self._faults.get(cluster)
        return fault is not None and fault.is_over(self._share_of(cluster))

    def _share_of(self, cluster: str) -> float:
        """Return the cluster's share of the inner steps that it is due."""
        return self.steps.get(cluster, 0) / self._due[cluster]

    def _begin_worker(self, cluster: str, theta: Arrays) -> Inner:
        """Make a cluster's worker: the first one draws the cluster's batches, each later one other batches."""
        begun = self._begun[cluster] = self._begun.get(cluster, 0) + 1
        model = self._make_model()
        self._bind_parameters(model, theta)
        draw = BatchDraw(self._seed, self._names.index(cluster), len(self._names), "" if begun == 1 else str(begun))
        inner = Inner(self._task, self._recipe, draw, model)
        if begun == 1 and cluster in self._parallel:
            inner.go_on_from(self._parallel[cluster])
        return inner

    def _make_model(self) -> nn.Module:
        model = make_model(self._task, self._seed)
        model.load_state_dict(self._state)
        return model

    def _bind_parameters(self, model: nn.Module, theta: Arrays) -> None:
        """Make the module compute with θ itself, so that steps change it in place."""
        flat = self.views(theta)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in flat:
                    parameter.data = torch.from_numpy(flat[name]).view(parameter.shape)

    def _find_places(self) -> dict[str, tuple[int, slice]]:
        found = {}
        for i, layer in enumerate(self.manifest.layers):
            for k, parameter in enumerate(layer.parameters):
                where = self._layout.fields[i, k]
                found[parameter.name] = (i, slice(where.start, where.start + where.numel))
        return found


class LastRounds:
    """The mean of θ at the ends of a run's last rounds: its loss says what θ's does, with less noise.

    A round is H inner steps of every cluster, counted by accepted tokens, so it is as long in every method.
    """

    ROUNDS = 5

    def __init__(self, steps: int, fleet: Fleet) -> None:
        """`steps`: of the run, by all clusters."""
        each = fleet.inner_steps * len(fleet.members)
        ends = (steps - back * each for back in range(self.ROUNDS))
        self._due = sorted(max(each, end) for end in ends)
        self._sums: dict[int, npt.NDArray[np.float64]] = {}
        self._noted = 0

    def is_due(self, steps: int) -> bool:
        """Whether θ after so many accepted steps is to be noted."""
        return bool(self._due) and steps >= self._due[0]

    def note(self, steps: int, theta: Mapping[int, F32]) -> None:
        """Note θ if a round has ended since the last one that was noted; it is copied."""
        if self.is_due(steps):
            self._due = [due for due in self._due if due > steps]
            self._sums = {layer: self._sums.get(layer, 0.0) + a.astype(np.float64) for layer, a in theta.items()}
            self._noted += 1

    def mean(self, last: Mapping[int, F32]) -> dict[int, F32]:
        """Return the mean; `last` is θ at the end of the run, which counts by itself if the run ended too early."""
        if self._due:
            self.note(self._due[-1], last)
        return {layer: (total / self._noted).astype(np.float32) for layer, total in self._sums.items()}


def _is_same(trained: Arrays, theta: Arrays) -> bool:
    """Return whether both are the same memory."""
    return all(np.may_share_memory(a, theta[layer]) for layer, a in trained.items())


def flatten(parameters: Mapping[str, Tensor]) -> F32:
    """Return all parameters concatenated, as a copy."""
    return torch.cat([p.detach().reshape(-1) for p in parameters.values()]).numpy()


def fill(parameters: Mapping[str, Tensor], theta: F32) -> None:
    """Copy a flat θ into the parameters, as the reverse of `flatten`."""
    with torch.no_grad():
        rest = torch.from_numpy(theta)
        for parameter in parameters.values():
            head, rest = rest[: parameter.numel()], rest[parameter.numel() :]
            parameter.copy_(head.view(parameter.shape))
