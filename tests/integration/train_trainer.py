"""The example of transformers' Trainer; it crashes once and goes on from its checkpoint.

    train_trainer.py OUT EXAMPLE.py CRASH_AT [WORDS…]

CRASH_AT counts optimizer steps. OUT gets each row's number as it is read, and at the end the Trainer's log.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from run_example import load

from dips.client import OuterLoop
from dips.client.transformers import OuterCallback


def main(out: Path, path: Path, crash_at: int, words: list[str]) -> None:
    torch.set_num_threads(1)
    example = load(path)
    crashed = out.with_suffix(".crashed")
    with out.open("a", buffering=1) as log:
        read, step, resume = example.Text.__getitem__, OuterCallback.on_step_end, OuterLoop.load_state_dict

        def read_row(self: Any, index: int) -> Any:
            log.write(json.dumps({"row": index}) + "\n")
            return read(self, index)

        def on_step_end(self: OuterCallback, args: Any, state: Any, control: Any, **others: Any) -> None:
            step(self, args, state, control, **others)
            if state.global_step == crash_at and not crashed.exists():
                crashed.touch()
                os._exit(1)

        def load_state_dict(self: OuterLoop, state: Any) -> str:
            told = resume(self, state)
            log.write(json.dumps({"told": told}) + "\n")
            return told

        example.Text.__getitem__, OuterCallback.on_step_end = read_row, on_step_end
        OuterLoop.load_state_dict = load_state_dict  # type: ignore[method-assign]
        trainer = example.main(words)
        log.write(json.dumps({"log": trainer.state.log_history, "steps": trainer.state.global_step}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
