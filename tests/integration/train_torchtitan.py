"""Released torchtitan as a cluster of a run, on CPU.

    train_torchtitan.py start OUT.npz dense|experts     the parameters and buffers that the run begins with
    train_torchtitan.py train OUT dense|experts         under torchrun and an agent; writes OUT.RANK as JSON
    train_torchtitan.py check OUT experts               under torchrun alone, four ranks: what they would push and hold

The dense model saves every 4 steps and breaks off once, after 10, as a job that is preempted. Two ranks of FSDP; of the
experts each has half (expert parallel 2).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchtitan_cpu as titan
from check_layouts import pull, whole_theta

from dips.client import OuterLoop
from dips.client.parallel import HostMemory, full_parameters, lay_out
from dips.client.rank.agent_client import JobCollectives
from dips.client.torchtitan import join_trainer
from dips.protocol.grouping import Grouping

SHARED = ("*.expert_bias_E",)
SAVED_EVERY, BREAKS_AT = 4, 10


def start(out: Path, kind: str) -> None:
    config = titan.make_config(out.parent, kind == "experts")
    config.model_spec.model.update_from_config(config=config)
    torch.manual_seed(1)
    model = config.model_spec.model.build()
    model.init_weights()
    tensors, _ = full_parameters(model, SHARED if kind == "experts" else ())
    np.savez(out, **{name: tensor.detach().numpy() for name, tensor in tensors.items()})


def train(out: Path, kind: str) -> None:
    torch.set_num_threads(1)
    config = titan.make_config(out.parent / "titan", kind == "experts", 2 if kind == "experts" else 1)
    config.checkpoint.enable, config.checkpoint.interval = kind == "dense", SAVED_EVERY
    trainer = titan.make_trainer(config)
    losses, remarks, first = [], [], out.with_name("broken-off")
    say, log = OuterLoop.remark, trainer.metrics_processor.log
    OuterLoop.remark = lambda self, text: (remarks.append(text), say(self, text))[1]  # type: ignore[method-assign]

    def keep(step: int, loss: float, *words: Any, **options: Any) -> None:
        losses.append(loss)
        log(step, loss, *words, **options)

    trainer.metrics_processor.log = keep
    outer = join_trainer(trainer, learning_rate=lambda progress: 3e-3)
    if kind == "dense" and not first.exists():
        break_off(trainer, outer, first)
    trainer.train()
    outer.close()
    (model,) = trainer.model_parts
    shards = [p for p in model.parameters() if hasattr(p, "to_local")]
    found = {
        "losses": losses, "remarks": remarks, "steps": trainer.step, "sharded": len(shards),
        "held": {n: list(p.to_local().shape) for n, p in model.named_parameters() if "inner_experts" in n},
        "theta": {name: digest(p.full_tensor()) for name, p in model.named_parameters()}
        | {name: digest(b) for name, b in model.named_buffers() if name.endswith("expert_bias_E")},
    }  # fmt: skip
    out.with_name(f"{out.name}.{dist.get_rank()}").write_text(json.dumps(found))
    trainer.close()
    dist.destroy_process_group()


def check(out: Path, kind: str) -> None:
    """Experts over two ranks and sharded over two: pushed as torch gathers them, pulled exactly."""
    torch.set_num_threads(1)
    trainer = titan.make_trainer(titan.make_config(out.parent / "titan", kind == "experts", 2))
    (model,), collectives = trainer.model_parts, JobCollectives()
    layout = lay_out(model, collectives, grouping=Grouping(share_buffers=SHARED), spread_items=64)
    memory = HostMemory(layout.adapter, layout.held, layout.plan, collectives)
    memory.gather_pieces()
    full = {name: p.full_tensor().detach().numpy().copy() for name, p in model.named_parameters()}
    pushed = whole_theta(collectives, layout, memory)
    other = {name: theta + np.arange(theta.size, dtype=np.float32).reshape(theta.shape) for name, theta in full.items()}
    buffers = {name: b.numpy().copy() for name, b in model.named_buffers() if name.endswith("expert_bias_E")}
    pull(layout, memory, {**other, **{name: b + 1 for name, b in buffers.items()}})
    held = {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}
    found = {
        "push": [n for n, theta in {**full, **buffers}.items() if not np.array_equal(pushed[n], theta.reshape(-1))],
        "pull": [n for n, theta in other.items() if not np.array_equal(held[n], theta)],
        "bias": [n for n, b in model.named_buffers() if n in buffers and not np.array_equal(b.numpy(), buffers[n] + 1)],
        "placements": sorted({str(p.placements) for n, p in model.named_parameters() if "inner_experts" in n}),
    }
    out.with_name(f"{out.name}.{dist.get_rank()}").write_text(json.dumps(found))
    collectives.close()
    trainer.close()
    dist.destroy_process_group()


def break_off(trainer: Any, outer: OuterLoop, first: Path) -> None:
    own = trainer.train_step

    def step(batches: Any) -> None:
        own(batches)
        if trainer.step == BREAKS_AT:
            first.write_text(str(outer.version))
            os._exit(1)

    trainer.train_step = step


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    {"start": start, "train": train, "check": check}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
