"""A small task for many runs, in which the first cluster's data may be of another kind and healthy all the same.

The next byte by a window of six and an MLP of 44,000 parameters, on the text of the default task. The kinds:

    same    as all others
    noisy   a share of its bytes is drawn at random, in what is read and in what is asked for: harder by as much
    rot     the same text in another alphabet: as hard, with nothing in common
    cpp     C++ headers: another language, and harder
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from dips.demo.data import Text, from_files, load_corpus
from dips.study.task import Batch, BatchDraw, Task

WINDOW = 6
EMBED = 12
CORPUS_SEED = 1
VALIDATION_DRAWS = 20_000
PRINTABLE = range(32, 127)
FOREIGN = 0  # the cluster whose data is of the kind: the fastest, which weighs most


class WindowModel(nn.Module):
    """Two hidden layers over the last WINDOW bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, EMBED)
        self.blocks = nn.ModuleList([nn.Linear(WINDOW * EMBED, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 256)

    def forward(self, window: Tensor) -> Tensor:
        hidden = self.embed(window).flatten(1)
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        logits: Tensor = self.head(hidden)
        return logits


def build(kind: str = "same", noise: float = 0.0, batch: int = 128, width: int = 96) -> Task:
    """`noise`: the share of random bytes in the kind `noisy`."""

    def draw_batches(draw: BatchDraw) -> Iterator[Batch]:
        text = foreign_text(kind, noise) if draw.cluster == FOREIGN else load_corpus(CORPUS_SEED).training
        rng = Random(f"{draw.seed}/batches/{draw.cluster}/{draw.stream}")
        while True:
            yield _cut_windows(text, rng, batch)

    def validate(model: nn.Module) -> float:
        with torch.no_grad():
            return float(_loss(model, _cut_windows(load_corpus(CORPUS_SEED).validation, Random(9), VALIDATION_DRAWS)))

    return Task(lambda: WindowModel(width), draw_batches, _loss, validate, batch, "nats per byte")


@cache
def foreign_text(kind: str, noise: float) -> Text:
    """What the foreign cluster trains on."""
    text = load_corpus(CORPUS_SEED).training
    if kind == "rot":
        return _other_alphabet()[text]
    if kind == "cpp":
        headers = sorted((Path(torch.__file__).parent / "include").rglob("*.h"))
        return from_files(headers, CORPUS_SEED).training
    if kind == "noisy":
        rng = np.random.default_rng(CORPUS_SEED)
        drawn = rng.integers(PRINTABLE.start, PRINTABLE.stop, text.shape, dtype=np.uint8)
        return np.where(rng.random(text.shape) < noise, drawn, text)
    return text


def _other_alphabet() -> Text:
    table, mixed = np.arange(256, dtype=np.uint8), list(PRINTABLE)
    Random(5).shuffle(mixed)
    table[list(PRINTABLE)] = mixed
    return table


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _cut_windows(text: Text, rng: Random, count: int) -> Batch:
    flat = text.reshape(-1)
    starts = np.array([rng.randrange(len(flat) - WINDOW) for _ in range(count)])
    rows = torch.from_numpy(flat[starts[:, None] + np.arange(WINDOW + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, -1]
