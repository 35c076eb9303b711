"""A training script that saves a checkpoint in the middle of a range, crashes once, and goes on from what it saved.

    train_checkpoint.py OUT SAVE_AT CRASH_AT

Every inner step moves θ by a number that depends on the data range and on the step within it, and a line of OUT says
which. SAVE_AT and CRASH_AT count inner steps; 0 never happens.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from train_constant import ConstantModel

from dips.client import OuterLoop

STEPS_A_RANGE = 4


def main(out: Path, save_at: int, crash_at: int) -> None:
    torch.manual_seed(0)
    model, checkpoint, crashed = ConstantModel(), out.with_suffix(".pt"), out.with_suffix(".crashed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with OuterLoop(model) as outer, out.open("a", buffering=1) as log:
        cursor, steps = 0, 0
        if checkpoint.exists():
            state = torch.load(checkpoint)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            said = outer.load_state_dict(state["outer"])
            steps = state["steps"]
            cursor = state["cursor"] if said.startswith("resumed") else 0
            log.write(f"# {said}\n")
        for number in outer.ranges():
            for at in range(cursor, STEPS_A_RANGE):
                optimizer.zero_grad()
                loss = sum(((p - 0.1 * number - 0.01 * at) ** 2).sum() for p in model.parameters())
                loss.backward()
                optimizer.step()
                steps += 1
                log.write(f"{number} {at}\n")
                outer.step(tokens=8, loss=loss)
                if steps == save_at and not checkpoint.exists():
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "cursor": at + 1}
                    torch.save({**state, "outer": outer.state_dict(), "steps": steps}, checkpoint)
                if steps == crash_at and not crashed.exists():
                    crashed.touch()
                    os._exit(1)
            cursor = 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
