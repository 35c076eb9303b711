"""A training script that counts: each sequence that it trains adds 1 to one element of the model.

train_counts.py DATA OUT PAUSE_AT

Once, when PAUSE_AT samples of the last range are trained, it writes OUT.paused before it reports that step, and waits
for OUT.go; if OUT.crash is there, it dies.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from dips.client import OuterLoop
from dips.client.data import Feed, RangeDataset, TokenBatches
from dips.data import DataSet

SEQUENCES, LENGTH, TOKENS, RANGES = 4, 16, 480, 3


class Counts(nn.Module):
    """How often the sequence that begins with a token was trained, by that token."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(TOKENS))


def main(directory: str, out: Path, pause_at: int) -> None:
    model = Counts()
    batches = TokenBatches(DataSet(directory), SEQUENCES, LENGTH)
    with OuterLoop(model) as outer:
        feed = Feed(outer, DataLoader(RangeDataset(batches), batch_size=None))
        for batch in feed:
            with torch.no_grad():
                model.counts[batch[:, 0]] += 1
            if feed.number == RANGES - 1 and feed.cursor >= pause_at:
                pause_once(out)
            outer.step(tokens=feed.samples * LENGTH)
    out.write_text(json.dumps(model.counts.tolist()))


def pause_once(out: Path) -> None:
    """Let the test end a process now."""
    paused = out.with_suffix(".paused")
    if paused.exists():
        return
    paused.touch()
    while not out.with_suffix(".go").exists():
        if out.with_suffix(".crash").exists():
            os._exit(1)
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
