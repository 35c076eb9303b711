"""Validation losses of the demo's models, in nats per byte on held-out bytes.

`python -m dips.demo.evaluate SEED` is what the demo's master runs for every tenth version.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from dips.demo import data
from dips.demo.data import Text, bigram_entropy
from dips.demo.model import build, loss_of, next_byte_loss
from dips.store.version import MOMENTUM, THETA

VALIDATION_ROWS, VALIDATION_LENGTH = 256, 256
BATCH = 32


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses in nats per byte on the same validation bytes."""

    first: float  # version 0
    head: float  # the last version, from the slaves' snapshots
    exported: float  # the file of `dips export`, in a plain module
    bigrams: float  # entropy of a byte given the one before it
    left: float | None = None  # the version from which the run continued after a loss; None: there was none
    transformers: float | None = None  # the exported directory, by from_pretrained; None: transformers is not installed


def evaluate_losses(
    initial: Path,
    snapshots: Sequence[Path],
    exported: Path,
    sample: Text,
    left: Sequence[Path] = (),
    directory: Path | None = None,
) -> Losses:
    """Evaluate version 0, the head and the exported file.

    snapshots  directories of the head, one per slave
    left       copies of the version from which the run continued after a loss; empty: there was none
    directory  of the head for transformers; None: there is none
    """
    models = (_join_files([initial]), _join_files(snapshots), load_file(exported))
    first, head, plain = (validation_loss(model, sample) for model in models)
    before = validation_loss(_join_files(left), sample) if left else None
    pretrained = _pretrained_loss(directory, sample) if directory else None
    return Losses(first, head, plain, bigram_entropy(sample), before, pretrained)


def _join_files(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Return θ from several versions' directories, or from one exported file with the parameters' own names."""
    files = [file for path in paths for file in (path.glob("*.safetensors") if path.is_dir() else [path])]
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name.removeprefix(THETA): tensor for name, tensor in tensors.items() if not name.startswith(MOMENTUM)}


def validation_sample(seed: int) -> Text:
    """Return the held-out bytes of a demo's corpus, uint8[rows, length + 1]."""
    return data.load_corpus(seed).validation_sample(VALIDATION_ROWS, VALIDATION_LENGTH)


def validation_loss(theta: Mapping[str, torch.Tensor], sample: Text) -> float:
    """Load θ into a plain module, strictly, and return its loss; sample uint8[rows, length + 1]."""
    model = build()
    model.load_state_dict(dict(theta))
    return _mean_loss(partial(loss_of, model), sample)


def _pretrained_loss(directory: Path, sample: Text) -> float:
    """Return the loss as a user of transformers would compute it: from_pretrained, logits, cross entropy."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory)
    return _mean_loss(lambda batch: next_byte_loss(model(batch[:, :-1]).logits, batch), sample)


def _mean_loss(loss_of_batch: Callable[[torch.Tensor], torch.Tensor], sample: Text) -> float:
    sequences = torch.from_numpy(sample.astype(np.int64))
    with torch.no_grad():
        parts = [(float(loss_of_batch(batch)), len(batch)) for batch in sequences.split(BATCH)]
    return sum(loss * rows for loss, rows in parts) / len(sequences)


if __name__ == "__main__":
    torch.set_num_threads(1)  # leaves the cores to the trainers
    loss = validation_loss(load_file(Path(os.environ["DIPS_MODEL"])), validation_sample(int(sys.argv[1])))
    print(json.dumps({"validation_loss": loss}))
