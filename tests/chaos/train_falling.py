"""A training script whose loss falls: every parameter goes a little towards its target.

train_falling.py
"""

from __future__ import annotations

import time

import torch
from torch import nn

from dips.client import OuterLoop

START, TARGET, RATE = 3.0, 1.0, 0.01


class FallingModel(nn.Module):
    """Two layers, for two slaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(START)


def loss_of(theta: list[torch.Tensor]) -> float:
    """Mean squared distance to the target."""
    flat = torch.cat([t.flatten() for t in theta])
    return float(((flat - TARGET) ** 2).mean())


def main() -> None:
    model = FallingModel()
    with OuterLoop(model) as outer:
        while not outer.finished:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= RATE * (parameter - TARGET)
            time.sleep(0.02)
            outer.step(tokens=8, loss=torch.tensor(loss_of([p.detach() for p in model.parameters()])))


if __name__ == "__main__":
    main()
