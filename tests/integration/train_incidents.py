"""A training script that does as a file says: train_incidents.py OUT.

OUT.mode holds one word: `steady` (the default) takes inner steps of a quarter of a second; `wild` makes every parameter
huge before each; `eager` does not make them last; `still` takes none; `away` does not join. OUT.pid names this process.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from train_constant import ConstantModel

from dips.client import OuterLoop

STEP_S = 0.25


def main(out: Path) -> None:
    mode, model = out.with_name(f"{out.name}.mode"), ConstantModel()
    out.with_name(f"{out.name}.pid").write_text(str(os.getpid()))
    while _read(mode) == "away":
        time.sleep(STEP_S)
    with OuterLoop(model) as outer:
        while not outer.finished:
            word = _read(mode)
            time.sleep(0.0 if word == "eager" else STEP_S)
            if word == "still":
                continue
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e3 if word == "wild" else 1e-3)
            outer.step(tokens=8, loss=torch.tensor(1.5))


def _read(mode: Path) -> str:
    return mode.read_text() if mode.exists() else "steady"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
