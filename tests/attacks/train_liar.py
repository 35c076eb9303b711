"""A training script that counts wrongly: honest for so many inner steps, then so many tokens in each.

train_liar.py HONEST_STEPS TOKENS
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import time

import torch
from train_constant import ConstantModel

from dips.client import OuterLoop


def main(honest_steps: int, tokens: int) -> None:
    model, step = ConstantModel(), 0
    with OuterLoop(model) as outer:
        while not outer.finished:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3)
            time.sleep(0.02)
            step += 1
            outer.step(tokens=8 if step <= honest_steps else tokens, loss=torch.tensor(1.5))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(float(sys.argv[2])))
