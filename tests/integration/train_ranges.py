"""A training script that reads ranges by a DataLoader with workers, and writes down every sequence that it was given.

train_ranges.py DATA OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from dips.client import OuterLoop
from dips.client.data import Feed, RangeDataset, TokenBatches
from dips.data import DataSet

SEQUENCES, LENGTH = 2, 16


def build() -> nn.Module:
    return nn.Linear(4, 4)


def main(directory: str, out: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = TokenBatches(DataSet(directory), SEQUENCES, LENGTH)
    seen: list[int] = []
    with OuterLoop(model) as outer:
        loader = DataLoader(RangeDataset(batches), batch_size=None, num_workers=2, persistent_workers=True)
        feed = Feed(outer, loader)
        for batch in feed:
            seen += batch[:, 0].tolist()
            loss = model(batch[:, :4].float() / 100).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outer.step(tokens=feed.samples * LENGTH, loss=loss)
    out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
