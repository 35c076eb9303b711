"""A regression under AdamW whose gradient holds one NaN, on one rank, in inner steps that are named.

    train_diverging.py OUT STEP      that one; or `ever`: all of them. A second start of the script is not spoilt

Each rank writes to OUT.RANK: its loss at every step, the version at each, and whether the last parameters are finite.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dips.client import OuterLoop
from dips.client.parallel.adapter import is_dtensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def spoilt_steps(word: str) -> Container[int]:
    if os.environ.get("DIPS_ATTEMPT", "1") != "1":
        return ()
    return range(1 << 30) if word == "ever" else (int(word),)


def main(out: Path, spoilt: Container[int]) -> None:
    rank = int(os.environ.get("RANK", "0"))
    model = build()
    if "RANK" in os.environ:
        from torch.distributed.fsdp import fully_shard  # a plain rank does not wait seconds for it

        dist.init_process_group("gloo")
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    target = data[:, :1] * 0.5 + data[:, 1:2].sin()
    losses, versions = [], []
    with OuterLoop(model) as outer:
        while not outer.finished:
            optimizer.zero_grad()
            loss = (model(data) - target).square().mean()
            loss.backward()
            if len(losses) in spoilt and rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
                local(next(model.parameters()).grad).view(-1)[0] = float("nan")
            optimizer.step()
            losses.append(float(loss.detach()))
            versions.append(outer.version.version)
            outer.step(tokens=64, loss=loss.detach())
    finite = all(bool(torch.isfinite(local(p)).all()) for p in model.parameters())
    out.with_name(f"{out.name}.{rank}").write_text(json.dumps({"losses": losses, "at": versions, "finite": finite}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), spoilt_steps(sys.argv[2]))
