"""DeepSpeed itself, one process on a CPU, in bf16.

train_deepspeed.py MODE STAGE    STAGE of ZeRO; MODE says what OuterLoop is given:
    engine    the engine
    module    the module that it wraps, not its optimizer
    given     the module, and its optimizer
    early     the model, before the engine is made of it
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

from dips.client import OuterLoop


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(16, 8)


def make_engine(model: nn.Module, stage: int) -> Any:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_PORT": "0"}
    import deepspeed

    # An operation of its communication, which it would compile for minutes, and does without.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), config=config)[0]


def main(mode: str, stage: int) -> None:
    model = build()
    early = OuterLoop(model) if mode == "early" else None
    engine = make_engine(model, stage)
    given = {"optimizer": engine.optimizer} if mode == "given" else {}
    with early or OuterLoop(engine if mode == "engine" else engine.module, **given) as outer:
        while not outer.finished:
            engine.backward(engine(torch.ones(1, 16, dtype=torch.bfloat16)).float().sum())
            engine.step()
            outer.step(tokens=8)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
