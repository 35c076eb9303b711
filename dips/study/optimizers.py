"""Optimizers of the inner steps, by their names in a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from dips.errors import ConfigError

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
