"""Run one of configs/examples as it stands, and write down what this rank ended with.

    run_example.py OUT CLUSTERS EXAMPLE.py [WORDS…]

writes OUT.RANK as JSON: losses, and a digest of each full parameter.

Nobody trains before all clusters have joined: how fast a machine starts torchrun is not what is tested. Megatron's
example gets the CPU where it asks for CUDA.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import full
from torch import nn

from dips.client import OuterLoop


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as if it were started there: one example imports another
    spec.loader.exec_module(module)
    return module


def digest(parameter: torch.Tensor) -> str:
    return hashlib.sha256(full(parameter).contiguous().numpy().tobytes()).hexdigest()


def theta(model: nn.Module) -> dict[str, str]:
    """A digest of each full parameter, gathered by torch itself; every rank calls it."""
    return {name: digest(p) for name, p in model.named_parameters()}


def meet(out: Path, clusters: int) -> None:
    """Make every OuterLoop wait, once it has joined, until all clusters have."""
    join = OuterLoop.__init__

    def joined(self: OuterLoop, *words: Any, **options: Any) -> None:
        join(self, *words, **options)
        out.with_name(f"{out.name}.joined").touch()
        while len(list(out.parent.glob("*.joined"))) < clusters:
            time.sleep(0.05)

    OuterLoop.__init__ = joined  # type: ignore[method-assign]


def main(out: Path, clusters: int, example: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    meet(out, clusters)
    if example.stem == "hf_trainer":
        trainer = load(example).main(words)
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        tokens = trainer.state.num_input_tokens_seen
        found = {"theta": theta(trainer.model), "losses": losses, "tokens": tokens, "steps": trainer.state.global_step}
    elif example.stem == "megatron_gpt":
        import megatron_layouts

        megatron_layouts.shim()
        found = load(example).main(words)
    else:
        model, losses = load(example).main(words)
        found = {"theta": theta(model), "losses": losses}
    out.with_name(f"{out.name}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
