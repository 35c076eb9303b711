"""The training script of both clusters of the demo; lines that Di-PS adds are numbered on the right.

Started by `dips-client --config cluster.yaml -- torchrun --nproc-per-node N -m dips.demo.train`. With more than one
rank the model is sharded by FSDP2. Everything else is an ordinary loop: data, loss, AdamW, a schedule.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dips.client import OuterLoop  # 1
from dips.demo.data import Corpus, Text, load_corpus
from dips.demo.model import build, loss_of

LR, LEAST_LR = 3e-3, 3e-4
WARMUP_STEPS = 20  # inner steps of this process: AdamW's moments start at zero in each incarnation of a trainer
SEQUENCES, LENGTH = 4, 256  # per rank in one inner step
LATE_S = 2.0  # longest pause, so that a slow moment of the machine does not stop the slow cluster


def main() -> None:
    args = _parse_arguments()
    torch.set_num_threads(1)
    rank, world = _join_ranks()
    model = build()  # its values do not matter: the outer loop pulls those of the run
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    outer = OuterLoop(model)  # 2
    corpus = load_corpus(args.seed)
    for number in outer.ranges():
        train_on(corpus, number, model, optimizer, outer, rank, world, args.slowdown)
        if outer.finished:
            break
    outer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def train_on(
    corpus: Corpus,
    number: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: OuterLoop,
    rank: int,
    world: int,
    slowdown: float,
) -> None:
    """Train on one leased data range; return early if the run is over."""
    for batch in corpus.batches(number, SEQUENCES, LENGTH, rank, world):
        begun = time.monotonic()
        loss = inner_step(model, optimizer, batch, learning_rate(outer.inner_steps, outer.progress))
        time.sleep(min(LATE_S, (time.monotonic() - begun) * (slowdown - 1)))
        outer.step(local_tokens=SEQUENCES * LENGTH, loss=loss)  # 3
        if outer.finished:
            return


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Text, lr: float) -> torch.Tensor:
    """Take one step of AdamW on this rank's sequences; return the loss."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = loss_of(model, torch.from_numpy(batch.astype("int64")))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def learning_rate(step: int, progress: float) -> float:
    """Return the learning rate: warmed up by this process's steps, then decayed by the run's progress, since clusters
    have no common step count.
    """
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (LEAST_LR + (LR - LEAST_LR) * cosine)


def _join_ranks() -> tuple[int, int]:
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of a cluster of the demo.")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the data; the same in all clusters")
    parser.add_argument("--slowdown", type=float, default=1.0, help="times slower than this machine can")
    return parser.parse_args()


if __name__ == "__main__":
    main()
