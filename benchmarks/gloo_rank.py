"""The outer step without Di-PS, run by torchrun: all-reduce of the pseudo-gradient, then Nesterov on every rank.

    gloo_rank.py NUMEL ROUNDS OUT

Every rank holds θ, its own θ_j and the momentum; rank 0 writes the seconds of each round, barrier to barrier, to OUT.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(numel: int, rounds: int, out: Path) -> None:
    dist.init_process_group("gloo")
    theta = torch.nn.Parameter(torch.zeros(numel))
    theta_j, delta = torch.zeros(numel), torch.empty(numel)
    theta.grad = delta
    optimizer = torch.optim.SGD([theta], lr=0.7, momentum=0.8, nesterov=True)
    took = []
    for _ in range(rounds):
        theta_j.add_(1e-3)
        dist.barrier()
        begun = time.perf_counter()
        torch.sub(theta.data, theta_j, out=delta)
        dist.all_reduce(delta)
        delta.div_(dist.get_world_size())
        optimizer.step()
        theta_j.copy_(theta.data)
        dist.barrier()
        took.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(took))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
