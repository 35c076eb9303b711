"""A GPT of one's own on a text of one's own: FSDP2 under torchrun, a plain process without; clusters of both train one.

    dips init --config dips.yaml --factory own_gpt:build --seed 1                            # in this directory
    dips-client --config west.yaml -- torchrun --nproc-per-node 2 own_gpt.py book.txt        # two ranks of FSDP2
    dips-client --config east.yaml -- python own_gpt.py book.txt --seed 2                    # a plain process

The text is read as bytes; every rank of every cluster draws windows of its own from it. What Di-PS adds is marked on
the right. Set `shared.stop.tokens`: the learning rate falls with the run's progress.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as f

from dips.client import OuterLoop, cosine, schedule  # 1

BYTES, WIDTH, LAYERS, HEADS, LENGTH = 256, 48, 2, 4, 48


class GptBlock(nn.Module):
    """Attention and feed-forward, each on a normed copy, added back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, time, WIDTH]
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.down(f.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Bytes to logits of the next byte; input and output share one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(GptBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.head.weight = self.embedding.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:  # int64 [batch, time] → [batch, time, BYTES]
        x = self.embedding(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> Gpt:
    """The model of `dips init --factory`."""
    return Gpt()


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next byte; int64 [batch, time + 1]."""
    return f.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def main(words: Sequence[str] | None = None) -> tuple[nn.Module, list[float]]:
    """Train until the run is over; return the model and the loss of each inner step on this rank."""
    args = read_arguments(words)
    model, rank = spread_model(build())
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    batches, losses = draw_batches(args.text, args.sequences, args.seed * 1000 + rank), list[float]()
    with OuterLoop(model) as outer:  # 2
        rate = schedule(optimizer, outer, lambda share: cosine(share) * warmup(outer.inner_steps, args.warmup))  # 3
        while not outer.finished:
            loss = loss_of(model, next(batches).to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            losses.append(loss.item())
            outer.step(local_tokens=args.sequences * LENGTH, loss=loss)  # 4
    return model, losses


def warmup(steps: int, over: int) -> float:
    """A factor of the learning rate: rises to 1 over this process's first steps; the moments of AdamW begin at zero."""
    return min(1.0, (steps + 1) / over)


def spread_model(model: Gpt) -> tuple[nn.Module, int]:
    """The model on this rank's device, sharded if there are several ranks; and its rank."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if "RANK" not in os.environ:
        return model.to(device), 0
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model.to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), dist.get_rank()


def draw_batches(text: Path, sequences: int, seed: int) -> Iterator[torch.Tensor]:
    """Windows from anywhere in the text: int64 [sequences, LENGTH + 1]."""
    data, random = np.memmap(text, np.uint8, "r"), np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(data) - LENGTH, sequences)
        yield torch.from_numpy(data[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int64))


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="any file of more than a few thousand bytes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps; in a long run those of several outer steps")
    parser.add_argument("--sequences", type=int, default=4, help="of each rank in an inner step")
    parser.add_argument("--seed", type=int, default=1, help="of the data; another one in each cluster")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
