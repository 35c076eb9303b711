"""Real models in simulated clusters: an inner step is forward, backward and optimizer, on a batch of the cluster's own.

Every cluster draws batches from its own part of the corpus, in an order of its own; optimizer state stays in the
cluster, as in a real run. Same seed, same bits: torch runs single-threaded, and time plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from dips.demo.data import BLOCK_BYTES, Corpus, load_corpus
from dips.demo.model import Decoder, Shape, loss_of
from dips.protocol.manifest import Manifest
from dips.sim.site import Site
from dips.slave.ports import F32
from dips.wire.chunks import LayerLayout

SMALL = Shape(width=64, layers=2, heads=4, hidden=176, context=128)  # 0.13 M parameters
CLIP = 1.0  # of the inner gradient's norm
DECAY = 0.1
BETAS = (0.9, 0.95)
LEAST_LR = 0.1  # of the peak: where the cosine ends
LEAST_START = 0.25  # of the peak: progress is 0 until the first version, and a tiny first norm sets a tiny hard cap


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the inner steps are taken, in every method alike."""

    lr: float = 4e-3  # peak
    batch: int = 8  # sequences of an inner step
    length: int = 64  # bytes of a sequence
    warmup: float = 0.02  # of the run's tokens
    optimizer: str = "adamw"
    shape: Shape = SMALL

    @property
    def tokens(self) -> int:
        """Of an inner step."""
        return self.batch * self.length

    def rate(self, progress: float) -> float:
        """The learning rate at this share of the run's tokens: linear warm-up, then a cosine."""
        if progress < self.warmup:
            return self.lr * max(progress / self.warmup, LEAST_START)
        along = (progress - self.warmup) / (1.0 - self.warmup)
        return self.lr * (LEAST_LR + (1.0 - LEAST_LR) * 0.5 * (1.0 + math.cos(math.pi * min(along, 1.0))))


class BatchDraws:
    """A cluster's own draws of sequences from the training text."""

    def __init__(self, corpus: Corpus, recipe: Recipe, seed: int, name: str) -> None:
        self._text, self._recipe = corpus.training, recipe
        self._rng = Random(f"{seed}/batches/{name}")

    def draw(self) -> Tensor:
        """int64 [batch, length + 1]."""
        length, rng = self._recipe.length, self._rng
        rows = [
            self._text[rng.randrange(len(self._text)), at : at + length + 1]
            for at in (rng.randrange(BLOCK_BYTES - length) for _ in range(self._recipe.batch))
        ]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


class Inner:
    """One worker: a module, its optimizer and its batches."""

    def __init__(self, recipe: Recipe, batches: BatchDraws, theta: Mapping[str, Tensor]) -> None:
        self.recipe, self._batches = recipe, batches
        self.model = Decoder(recipe.shape)
        self.model.load_state_dict(dict(theta))
        self.optimizer = make_optimizer(recipe, self.model)

    def take_step(self, progress: float) -> float:
        """Train on one batch; return its loss before the step."""
        return self.train_on(self._batches.draw(), progress)

    def train_on(self, batch: Tensor, progress: float) -> float:
        """Train on `batch`, int64 [batch, length + 1]; return its loss before the step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(progress) * group.get("scale", 1.0)
        loss = loss_of(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return float(loss.detach())

    def draw(self) -> Tensor:
        """The worker's next batch."""
        return self._batches.draw()


class LearnedModel:
    """What a World trains (sim/model.py): a module for each cluster that has begun."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        torch.manual_seed(seed)
        self._recipe, self._seed, self._corpus = recipe, seed, load_corpus(seed)
        self._first = {name: p.detach().clone() for name, p in Decoder(recipe.shape).named_parameters()}
        self.manifest = Manifest.from_shapes([(name, tuple(p.shape)) for name, p in self._first.items()])
        self._layout = LayerLayout(self.manifest, range(len(self.manifest.layers)))
        self._places = self._find_places()
        self.genesis: dict[int, F32] = {
            i: np.zeros(layer.numel, np.float32) for i, layer in enumerate(self.manifest.layers)
        }
        for name, view in self.views(self.genesis).items():
            view[:] = self._first[name].numpy().reshape(-1)
        self._inner: dict[str, tuple[int, Inner]] = {}
        self.steps: dict[str, int] = {}  # by cluster

    def draw_tokens(self, site: Site) -> int:
        return self._recipe.tokens

    def take_inner_step(self, site: Site, theta: dict[int, F32], progress: float) -> float:
        inner = self._inner[site.name][1]
        flat = self.views(theta)
        loss = inner.take_step(progress)
        with torch.no_grad():
            for name, parameter in inner.model.named_parameters():
                flat[name][:] = parameter.numpy().reshape(-1)
        self.steps[site.name] = self.steps.get(site.name, 0) + 1
        return loss

    def on_install(self, site: Site, attempt: int, theta: dict[int, F32]) -> None:
        known = self._inner.get(site.name)
        if known is None or known[0] != attempt:
            batches = BatchDraws(self._corpus, self._recipe, self._seed, f"{site.name}/{attempt}")
            known = self._inner[site.name] = (attempt, Inner(self._recipe, batches, self._first))
        flat = self.views(theta)
        with torch.no_grad():
            for name, parameter in known[1].model.named_parameters():
                parameter.copy_(torch.from_numpy(flat[name]).view(parameter.shape))

    def views(self, theta: Mapping[int, F32]) -> dict[str, F32]:
        """Each parameter by name, as a flat view into the layers."""
        return {name: theta[layer][where] for name, (layer, where) in self._places.items()}

    def evaluate(self, theta: Mapping[int, F32]) -> float:
        """Validation loss of θ, in nats per byte."""
        model = Decoder(self._recipe.shape)
        flat = self.views(theta)
        model.load_state_dict({n: torch.from_numpy(flat[n].copy()).view(p.shape) for n, p in self._first.items()})
        return validation_loss(model, self._corpus, self._recipe)

    def _find_places(self) -> dict[str, tuple[int, slice]]:
        found = {}
        for i, layer in enumerate(self.manifest.layers):
            for k, parameter in enumerate(layer.parameters):
                where = self._layout.fields[i, k]
                found[parameter.name] = (i, slice(where.start, where.start + where.numel))
        return found


VALIDATION_ROWS = 512


def validation_loss(model: nn.Module, corpus: Corpus, recipe: Recipe) -> float:
    """Nats per byte on sequences that no worker has seen."""
    sample = torch.from_numpy(corpus.validation_sample(VALIDATION_ROWS, recipe.length).astype(np.int64))
    with torch.no_grad():
        parts = [(float(loss_of(model, batch)), len(batch)) for batch in torch.split(sample, 64)]
    return sum(loss * rows for loss, rows in parts) / len(sample)


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for all parameters, or Muon for the matrices inside and AdamW for the rest."""
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=BETAS, weight_decay=DECAY),
    }
    return makers[recipe.optimizer]()
