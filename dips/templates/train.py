"""Train the model on text: an ordinary loop, and the lines of Di-PS, which are marked on the right.

    dips up -- python train.py                        # everything on this machine
    dips-client --config cluster.yaml -- python train.py     # one cluster, beside a master and slaves that run already

Without an argument it reads the source of Python's standard library. Model sharded over several GPUs: see
configs/examples/ of Di-PS; the marked lines are the same.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from model import LENGTH, build
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dips.client import OuterLoop, schedule  # 1

SEQUENCES = 8  # of LENGTH bytes in an inner step
MOST_BYTES = 4_000_000  # of the standard library
SHOW_EVERY = 100  # inner steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?", help="any file of more than a few thousand bytes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1, help="of the data; another one in each cluster")
    args = parser.parse_args()

    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = build().to(device)  # its numbers do not matter: the outer loop pulls those of the run
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    outer = OuterLoop(model)  # 2
    rate = schedule(optimizer, outer)  # 3
    for batch in draw_batches(read_text(args.text), args.seed):
        if outer.finished:
            break
        text = batch.to(device)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if outer.inner_steps % SHOW_EVERY == 0:
            print(f"step {outer.inner_steps}  loss {loss.item():.3f}  from {outer.version}")
        outer.step(local_tokens=SEQUENCES * LENGTH, loss=loss)  # 4
    outer.close()


def read_text(path: Path | None) -> np.ndarray:
    if path is not None:
        return np.fromfile(path, np.uint8)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files)[:MOST_BYTES], np.uint8)


def draw_batches(text: np.ndarray, seed: int) -> Iterator[torch.Tensor]:
    """Windows from anywhere in the text: int64 [SEQUENCES, LENGTH + 1]."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - LENGTH, SEQUENCES)
        yield torch.from_numpy(text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int64))


if __name__ == "__main__":
    main()
