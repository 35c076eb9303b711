"""The outer loop's state in the Trainer's checkpoints: one file per rank in `checkpoint-N`.

The Trainer loads model and optimizer before it calls a callback, and the OuterLoop that the callback creates pulls over
them. So the loaded parameters are kept aside and put back, and the outer loop resumes from the saved state
(docs/architecture.md#silent-failures).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerState, TrainingArguments

from dips.files import sync_path, write_aside

FILE = "outer_state_{rank}.pt"
MISSING = (
    "{path} is not there: the checkpoint was saved without the outer loop, or elsewhere than in output_dir. The run's "
    "newest version was pulled"
)


def checkpoint_path(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the path of this rank's outer state in the checkpoint of the Trainer's current step."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / FILE.format(rank=args.process_index)


def write_outer_state(path: Path, outer: dict[str, Any], feed: dict[str, int]) -> None:
    """Save the outer loop's state and this rank's position in its data."""
    with write_aside(path) as aside:
        torch.save({"outer": outer, "feed": feed}, aside)
        sync_path(aside)


def read_outer_state(path: Path) -> tuple[dict[str, Any], dict[str, int]] | None:
    """Return the outer loop's state and the position in the data, or None if there is no such file."""
    if not path.exists():
        return None
    found = torch.load(path, weights_only=True)
    return found["outer"], found["feed"]


class HeldParameters:
    """A copy on the host of a rank's part of a model's trainable parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = {name: p.to("cpu", copy=True) for name, p in _local_parameters(model)}

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy the held parameters back into the model."""
        for name, parameter in _local_parameters(self._model):
            parameter.copy_(self._held[name])


def _local_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    trained = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
    return [(name, p.to_local() if isinstance(p, DTensor) else p) for name, p in trained]
