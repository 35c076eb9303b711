"""A planned pipeline whose devices come and go: ranks take the optimizer's state from a checkpoint, pull, and train.

    train_changing.py OUT

Rank 0 appends a line to OUT for each step; `plan.yaml` and the checkpoints are beside it. HOST has the host's name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dips.client import OuterLoop
from dips.inside.pipeline import Pipeline

VOCABULARY, WIDTH, LENGTH, BLOCKS = 11, 8, 6, 4
STEP_S, SAVE_EVERY = 0.1, 4


class ResidualLayer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Whole(nn.Module):
    """The whole model, as `dips profile` measures it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(ResidualLayer() for _ in range(BLOCKS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def build() -> Iterator[tuple[str, nn.Module]]:
    """Yield the model's layers."""
    model = Whole()
    yield "embed", model.embed
    yield from ((f"blocks.{i}", block) for i, block in enumerate(model.blocks))
    yield "head", model.head


def summed_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def train(out: Path) -> None:
    """Train until the run is over."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name = f"{os.environ['HOST']}.{os.environ['LOCAL_RANK']}"
    plan, latest = out.with_name("plan.yaml"), out.with_name("latest")
    pipe = Pipeline(
        build, plan, loss=summed_loss, optimizer=lambda part: torch.optim.AdamW(part.parameters(), lr=1e-2),
        device_name=name, collective_s=20.0,
    )  # fmt: skip
    if latest.exists():
        state = pipe.state_dict()
        dcp.load(state, checkpoint_id=latest.read_text())
        pipe.load_state_dict(state)
    devices: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(devices, name)
    rows = torch.arange(12)[:, None] * 7 + torch.arange(LENGTH + 1) ** 2
    with OuterLoop(pipe.parts) as outer:
        while not outer.finished:
            loss = pipe.step((rows[:, :-1] % VOCABULARY, rows[:, 1:] % VOCABULARY))
            time.sleep(STEP_S)
            if pipe.steps % SAVE_EVERY == 0:
                saved = out.with_name(f"checkpoint-{pipe.steps // SAVE_EVERY % 2}")
                dcp.save(pipe.state_dict(), checkpoint_id=saved)
                if dist.get_rank() == 0:
                    latest.write_text(str(saved))
            if dist.get_rank() == 0:
                line = {"at": time.time(), "devices": sorted(filter(None, devices)), "steps": pipe.steps, "loss": loss}
                with out.open("a") as file:
                    file.write(json.dumps({**line, "version": str(outer.version)}) + "\n")
            outer.step(tokens=pipe.tokens, loss=loss)
    pipe.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
