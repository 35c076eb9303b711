"""Training scripts of plain processes that would be wrong in silence.

    train_coarse.py idle OUT       bf16 parameters that nobody trains
    train_coarse.py hidden OUT     bf16 parameters under an optimizer with fp32 masters that the outer loop is not given
    train_coarse.py buried OUT     likewise, under one that keeps them where nobody looks
    train_coarse.py copies OUT     likewise, under one that steps fp32 copies
    train_coarse.py given OUT      the same, given
    train_coarse.py compiled OUT   torch.compile around DistributedDataParallel
    train_coarse.py apart OUT      ranks that train apart: DistributedDataParallel is forgotten
    train_coarse.py early OUT      a checkpoint that is loaded before OuterLoop is made, after a crash

Each writes to OUT what it found, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dips.client import OuterLoop

IDLE_STEPS = 6


class MasterSgd(torch.optim.Optimizer):
    """fp32 masters in the state, from which every step writes the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["master_param"] = p.detach().float().clone()
                self.state[p]["master_param"] -= 0.01
                p.copy_(self.state[p]["master_param"])


class FlatSgd(torch.optim.Optimizer):
    """fp32 masters in one flat buffer, as fused optimizers have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self._masters = torch.cat([p.detach().float().reshape(-1) for p in self.param_groups[0]["params"]])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._masters -= 0.01
        held, at = self.param_groups[0]["params"], 0
        for p in held:
            p.copy_(self._masters[at : at + p.numel()].view_as(p))
            at += p.numel()


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(16, 8)


def train_idle(model: nn.Module) -> dict[str, Any]:
    with OuterLoop(model.bfloat16()) as outer:
        for _ in range(IDLE_STEPS):
            outer.step(tokens=8)
    return {}


class CopySgd:
    """A loop by hand: torch's SGD on fp32 copies, which are copied back."""

    def __init__(self, params: Any) -> None:
        self._params = list(params)
        self._copies = [p.detach().float().clone() for p in self._params]
        self.optimizer = torch.optim.SGD(self._copies, lr=1.0)

    @torch.no_grad()
    def step(self) -> None:
        for copy in self._copies:
            copy.grad = torch.full_like(copy, 0.01)
        self.optimizer.step()
        for copy, p in zip(self._copies, self._params, strict=True):
            p.copy_(copy)


def train_with_masters(model: nn.Module, given: bool, kind: Any = MasterSgd) -> dict[str, Any]:
    optimizer = kind(model.bfloat16().parameters())
    with OuterLoop(model, optimizer=optimizer if given else None) as outer:
        while not outer.finished:
            model(torch.zeros(1, 16, dtype=torch.bfloat16))  # with `install: lazy` it brings what was pulled
            optimizer.step()
            outer.step(tokens=8)
    return {}


def train_compiled(model: nn.Module) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    wrapped: Any = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with OuterLoop(wrapped) as outer:
        while not outer.finished:
            optimizer.zero_grad()
            loss = wrapped(torch.ones(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            outer.step(tokens=8, loss=loss)
    torch.distributed.destroy_process_group()
    return {"losses": losses}


def train_apart(model: nn.Module) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(torch.distributed.get_rank())  # each rank has its own data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OuterLoop(model) as outer:
        while not outer.finished:
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            outer.step(local_tokens=8)
    return {}


def train_early(model: nn.Module, saved: Path) -> dict[str, Any]:
    said = ""
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])  # too early: what OuterLoop pulls replaces it
        with OuterLoop(model) as outer:
            said = outer.load_state_dict(state["outer"])
            while not outer.finished:
                with torch.no_grad():
                    model.weight.add_(0.5)
                outer.step(tokens=8)
        return {"said": said}
    with OuterLoop(model) as outer:
        with torch.no_grad():
            model.weight.add_(0.5)
        outer.step(tokens=8)
        torch.save({"model": model.state_dict(), "outer": outer.state_dict()}, saved)
        os._exit(1)


def main(mode: str, out: Path) -> None:
    model = build()
    found = {
        "idle": lambda: train_idle(model),
        "hidden": lambda: train_with_masters(model, given=False),
        "buried": lambda: train_with_masters(model, given=False, kind=FlatSgd),
        "copies": lambda: train_with_masters(model, given=False, kind=CopySgd),
        "given": lambda: train_with_masters(model, given=True),
        "compiled": lambda: train_compiled(model),
        "apart": lambda: train_apart(model),
        "early": lambda: train_early(model, out.with_suffix(".pt")),
    }[mode]()
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
