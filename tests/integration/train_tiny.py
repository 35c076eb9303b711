"""A training script of one plain process: steps until the run is over, or walks the data ranges leased to it.

    train_tiny.py steps|logged OUT | train_tiny.py ranges[:N] OUT | train_tiny.py wrong|still OUT

`steps` and `ranges` append a line to OUT for each incarnation and each range; N inner steps are
taken on each range, one by default; `wrong` brings a model that is not the
run's, `still` reports three steps that move nothing. `logged` takes steps as well, and appends what it hears of each
outer step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from train_constant import ConstantModel

from dips.client import OuterLoop


def main(mode: str, out: Path) -> None:
    model = ConstantModel()
    mode, _, steps = mode.partition(":")
    if mode == "wrong":
        model.head = nn.Linear(3, 2)
    with OuterLoop(model) as outer, out.open("a", buffering=1) as log:
        log.write(f"incarnation {outer.version}\n")
        if mode == "logged":
            outer.on_version(lambda version: {"heard": float(version.version)})
            outer.log_to(lambda numbers, step: log.write(f"{json.dumps(dict(numbers))}\n"))
        if mode == "still":
            for _ in range(3):
                outer.step(tokens=8)  # as if the optimizer had the parameters from before fully_shard
        elif mode == "ranges":
            for given in outer.ranges():
                log.write(f"range {given}\n")
                for _ in range(int(steps or 1)):
                    train(model, outer)
        else:
            while not outer.finished:
                train(model, outer)
        log.write("end\n")


def train(model: nn.Module, outer: OuterLoop) -> None:
    """One inner step: every parameter moves a little."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3)
    time.sleep(0.02)
    outer.step(tokens=8, loss=torch.tensor(1.5))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
