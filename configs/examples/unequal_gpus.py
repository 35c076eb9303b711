"""Train by plain FSDP2 on unequal GPUs: each rank takes as many micro-batches as a plan gives its device.

    dips plan cluster profile.yaml model.yaml -o plan.yaml          # a plan that has `shares`
    torchrun --nproc-per-node 2 unequal_gpus.py --plan plan.yaml    # ranks in the order of the plan's devices

A step has the gradients of one device: each rank's loss is the sum over its tokens, divided by the tokens of the global
batch, and FSDP2 sums gradients where it would average them. Where the plan is a pipeline of one stage, or ranks have
unequally many micro-batches, a step gathers parameters once, ahead of the first, and reduces gradients once, in a last
pass without rows; both are whole in memory in between. Public torch alone.

A trap: `set_is_last_backward(False)` before the last micro-batch. The last backward then gathers ahead what it has just
resharded, on some ranks more often than on others, and all wait for ever.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as f

from dips.demo.model import Decoder  # any model


def read_shares(plan: Path) -> tuple[list[tuple[int, int]], bool]:
    """Return for each rank its samples of a step, and the micro-batches that they are cut into; and whether parameters
    are gathered once a step.
    """
    data = yaml.safe_load(plan.read_text())
    shares = (data.get("shares") or {}).values()
    if len(shares) != dist.get_world_size():
        raise SystemExit(f"{plan}: expected shares of {dist.get_world_size()} devices, one a rank, got {len(shares)}")
    return [(share["samples"], share["microbatches"]) for share in shares], data.get("pipeline") is not None


def shard(model: Decoder, shares: Sequence[tuple[int, int]], once: bool = False) -> FSDPModule:
    """Shard each layer; with `once`, or unequally many micro-batches, parameters stay gathered through a step."""
    once = once or len({count for _, count in shares}) > 1
    for module in (*model.layers, model):
        made = fully_shard(module, reshard_after_forward=not once)
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)  # or it would be a sum that only NCCL has
    return made


def compute_gradients(
    model: FSDPModule, batch: Tensor, shares: Sequence[tuple[int, int]], rank: int, once: bool = False
) -> Tensor:
    """Add the gradients of a rank's rows of the global batch, i64[samples, T + 1]; return its part of the loss."""
    begin = sum(samples for samples, _ in shares[:rank])
    rows = batch[begin : begin + shares[rank][0]].tensor_split(shares[rank][1])
    once, loss = once or len({count for _, count in shares}) > 1, torch.zeros((), device=batch.device)
    if once:  # every layer's collective waits for the slowest rank: all of them before and after computing
        for module in filter(lambda m: isinstance(m, FSDPModule), model.modules()):  # type: ignore[attr-defined]
            module.unshard()
        rows = (*rows, batch[:0])  # a pass without rows only reduces
    for number, row in enumerate(rows, 1):
        model.set_requires_gradient_sync(not once or number == len(rows))
        model.set_reshard_after_backward(not once or number == len(rows))
        part = f.cross_entropy(model(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten(), reduction="sum")  # type: ignore[operator]
        (part / batch[:, 1:].numel()).backward()
        loss += part.detach() / batch[:, 1:].numel()
    return loss


def main() -> None:
    """Train on sequences that count up, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default="plan.yaml", help="what dips plan cluster wrote")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(0)  # one model and one global batch on all ranks; each takes its rows
    shares, once = read_shares(args.plan)
    model = shard(Decoder().to(device), shares, once)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # type: ignore[attr-defined]
    for step in range(args.steps):
        batch = (torch.randint(256, (sum(samples for samples, _ in shares), 1)) + torch.arange(33)) % 256
        loss = compute_gradients(model, batch.to(device), shares, dist.get_rank(), once)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.barrier()  # a thread of gloo that still holds a tensor when Python ends would abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
