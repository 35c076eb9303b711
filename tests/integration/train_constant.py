"""A training script without training: every parameter of every rank is set to one constant before each outer step.

    train_constant.py CLUSTER TOKENS CLUSTERS OUT

The constant is a function of the cluster and of the version that it trains on, so the ledger tells what was pushed.
After each pull every rank asserts that all of its elements are one number, and writes (version, number) to OUT.RANK.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.accelerator import DEVICE, take_device
from dips.client import OuterLoop
from dips.client.parallel.adapter import is_dtensor

START = 0.5  # every element of v0@r0
WORDS = 7 if DEVICE == "cpu" else 4_000_007  # 64 MB: copies that nobody waits for are seen to be late


class ConstantModel(nn.Module):
    """Blocks whose dim 0 does not divide by the ranks, a bias shorter than a block, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 3)])
        self.head = nn.Linear(3, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tensors() -> dict[str, npt.NDArray[np.float32]]:
    """θ of v0@r0."""
    return {name: np.full(tuple(p.shape), START, np.float32) for name, p in ConstantModel().named_parameters()}


def constant(cluster: str, version: int) -> float:
    """What `cluster` sets every parameter to while it trains on `version`."""
    return {"fast": 0.3, "slow": -0.2}[cluster] + 0.01 * version


def local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if is_dtensor(parameter) else parameter


def one_number(model: nn.Module) -> float | None:
    """The number that every element on this rank is; None if this rank holds none."""
    elements = torch.cat([local(p).detach().reshape(-1) for p in model.parameters()])
    if elements.numel() == 0:
        return None
    assert bool((elements == elements[0]).all()), f"torn: {elements.min()} to {elements.max()}"
    return float(elements[0])


def lay_out() -> ConstantModel:
    """The model of this rank: sharded if there are several, whole under DIPS_TEST_LAYOUT=ddp."""
    device = take_device(DEVICE, int(os.environ.get("LOCAL_RANK", "0")))
    model = ConstantModel().to(device)
    if "RANK" in os.environ:
        from torch.distributed.fsdp import fully_shard  # a plain rank does not wait seconds for it

        dist.init_process_group("gloo" if DEVICE == "cpu" else None)
        for part in (*model.blocks, model) if os.environ.get("DIPS_TEST_LAYOUT") != "ddp" else ():
            fully_shard(part)
    return model


def main(cluster: str, tokens: int, clusters: int, out: Path) -> None:
    rank = int(os.environ.get("RANK", "0"))
    model = lay_out()
    seen = []
    with OuterLoop(model) as outer:
        out.with_name(f"{out.name}.ready.{rank}").touch()
        while len(list(out.parent.glob("*.ready.0"))) < clusters:  # nobody makes a version before all are here
            time.sleep(0.05)
        while True:
            if not seen or seen[-1][0] != str(outer.version):
                seen.append((str(outer.version), one_number(model)))
            if outer.finished:
                break
            with torch.no_grad():
                for parameter in model.parameters():
                    local(parameter).fill_(constant(cluster, outer.version.version))
            outer.step(tokens=tokens)
    out.with_name(f"{out.name}.{rank}").write_text(json.dumps(seen))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
