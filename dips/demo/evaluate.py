"""The evaluation that the demo's master runs for every tenth version: `python -m dips.demo.evaluate SEED`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from dips.demo import data, verdict


def evaluate_file(model: Path, seed: int) -> dict[str, float]:
    """Return the validation loss of an exported model, on the same held-out bytes as the final verdict."""
    sample = data.load_corpus(seed).validation_sample(verdict.VALIDATION_ROWS, verdict.VALIDATION_LENGTH)
    return {"validation_loss": verdict.validation_loss(load_file(model), sample)}


if __name__ == "__main__":
    torch.set_num_threads(1)  # leaves the cores to the trainers
    print(json.dumps(evaluate_file(Path(os.environ["DIPS_MODEL"]), int(sys.argv[1]))))
