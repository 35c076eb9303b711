"""A training script whose loss falls, for whoever watches it: two small layers, a step takes as long as it is told.

train_watched.py STEP_S TOKENS [wild: its third push is far out of line | hostile: it dies of markup]
"""

from __future__ import annotations

import math
import sys
import time

import torch
from torch import nn

from dips.client import OuterLoop

WIDTH = 256  # 0.5 MB of parameters
WILD_STEPS = range(12, 18)
MARKUP = "<script>window.stolen=1</script><img src=x onerror=window.stolen=1>"


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def main(step_s: float, tokens: int, wild: bool, hostile: bool) -> None:
    torch.manual_seed(int(step_s * 1000))
    model, taken = make_model(), 0
    print(f"begins {MARKUP}", file=sys.stderr, flush=True)
    with OuterLoop(model) as outer:
        while not outer.finished:
            time.sleep(step_s)
            size = 5.0 if wild and taken in WILD_STEPS else 1e-4
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=size)
            taken += 1
            if hostile and taken == 2:
                sys.exit(MARKUP)
            noise = float(torch.randn(())) * 0.03 + step_s
            outer.step(tokens=tokens, loss=2.0 + 3.5 * math.exp(-outer.version.version / 25) + noise)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), "wild" in sys.argv[3:], "hostile" in sys.argv[3:])
