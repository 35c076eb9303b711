"""The GPT of own_gpt.py with Muon for the matrices inside its blocks: two optimizers, one outer loop.

    dips-client --config west.yaml -- torchrun --nproc-per-node 2 muon_gpt.py book.txt       # beside own_gpt.py

Clusters may differ in their optimizers: what they share is θ. Muon is in torch since 2.9.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from own_gpt import LENGTH, build, draw_batches, loss_of, read_arguments, spread_model, warmup
from torch import nn

from dips.client import OuterLoop, cosine, schedule  # 1


def make_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside the blocks; AdamW for embeddings, output and vectors.

    Muon's updates are scaled to the size of AdamW's, so one learning rate serves both.
    """
    inside = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    ids = set(map(id, inside))
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [
        torch.optim.Muon(inside, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
    ]


def main(words: Sequence[str] | None = None) -> tuple[nn.Module, list[float]]:
    """Train until the run is over; return the model and the loss of each inner step on this rank."""
    args = read_arguments(words)
    model, rank = spread_model(build())
    device = next(model.parameters()).device
    optimizers = make_optimizers(model, args.lr)
    batches, losses = draw_batches(args.text, args.sequences, args.seed * 1000 + rank), list[float]()
    with OuterLoop(model) as outer:  # 2
        rates = [
            schedule(o, outer, lambda s: cosine(s) * warmup(outer.inner_steps, args.warmup)) for o in optimizers
        ]  # 3
        while not outer.finished:
            loss = loss_of(model, next(batches).to(device))
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.step()
                rate.step()
            losses.append(loss.item())
            outer.step(local_tokens=args.sequences * LENGTH, loss=loss)  # 4
    return model, losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
