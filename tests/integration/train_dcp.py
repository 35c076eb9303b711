"""A training script that saves by torch.distributed.checkpoint, asynchronously, while it pushes.

    train_dcp.py OUT SAVES

Every inner step adds one number to every element, as in train_overlap.py, so a state is known by one number. Each save
is begun, then a push. Of every two saves one is held until the outer step is over, so that the outer step waits for it
if anything makes it; of every two pushes the other is held until the save is done. At its end each rank loads what was
saved and writes to OUT.RANK the number of each save beside the one that it should be.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.fsdp import fully_shard
from train_constant import ConstantModel, local, one_number

from dips.client import OuterLoop
from dips.client.rank import transfer

WITHIN_S = 60.0
STEP_S = 0.01
DELTA = 2.0**-10  # sums of it are exact in fp32


class Held(FileSystemWriter):
    """Writes nothing before it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()

    def write_data(self, *words: Any) -> Any:
        assert self.go.wait(WITHIN_S), "an outer step was not over while a checkpoint was being written"
        return super().write_data(*words)


def hold_pushes() -> threading.Event:
    """Let no push move before the event is set."""
    own, go = transfer.push_pieces, threading.Event()

    def push(*words: Any, **options: Any) -> Any:
        assert go.wait(WITHIN_S), "a checkpoint was not written while a push moved"
        return own(*words, **options)

    transfer.push_pieces = push  # type: ignore[assignment]
    return go


def wrapped(model: ConstantModel) -> ConstantModel:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def main(out: Path, saves: int) -> None:
    warnings.filterwarnings("ignore")  # torch's own, of its planner
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    own_group = dist.new_group(backend="gloo")
    model, pushes = wrapped(ConstantModel()), hold_pushes()
    steps, expected = 0, []

    def step(outer: OuterLoop) -> None:
        nonlocal steps
        outer.install()  # what follows writes parameters by hand
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).add_(DELTA)
        steps += 1
        time.sleep(STEP_S)
        outer.step(tokens=8, loss=1.0)

    with OuterLoop(model) as outer:
        for number in range(saves):
            for _ in range(3):
                step(outer)
            writer = Held(out.with_name(f"{out.name}.save{number}"))
            state = {"model": model.state_dict(), "outer": outer.state_dict()}
            save = dcp.async_save(state, storage_writer=writer, process_group=own_group)
            expected.append((steps, state["outer"]["inner_steps"]))
            save_first = bool(number % 2)
            (writer.go if save_first else pushes).set()
            before = outer.version
            if save_first:  # it is written while the push moves, or before: the push is not let go
                threading.Thread(target=lambda save=save: (save.result(WITHIN_S), pushes.set())).start()
            outer.push()
            while outer.version == before and not outer.finished:  # overlap: full
                step(outer)
            assert save.done() == save_first
            writer.go.set()
            save.result(WITHIN_S)
            pushes.clear()
        assert outer.finished
    end = one_number(model)
    found = []
    for number, (at, inner_steps) in enumerate(expected):
        reference = wrapped(ConstantModel())
        state = {"model": reference.state_dict(), "outer": {"inner_steps": -1}}
        path = out.with_name(f"{out.name}.save{number}")
        dcp.load(state, storage_reader=FileSystemReader(path), process_group=own_group)
        found.append((one_number(reference), at * DELTA, state["outer"]["inner_steps"] == inner_steps))
    out.with_name(f"{out.name}.{rank}").write_text(json.dumps({"saves": found, "steps": steps, "end": end}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
