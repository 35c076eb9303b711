"""The default task of a study: the next byte of the standard library's sources, by a small decoder.

With `unlike` every cluster has its own directories, so that their data differ; otherwise all draw from the same text.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from dips.demo.data import BLOCK_BYTES, Text, from_files, load_corpus, source_files
from dips.demo.model import Decoder, Shape
from dips.study.task import Batch, BatchDraw, Task

VALIDATION_ROWS, VALIDATION_BATCH = 5120, 64
CORPUS_SEED = 1  # fixed, since blocks are drawn at random


def build(
    width: int = 64, layers: int = 2, heads: int = 4, hidden: int = 176, batch: int = 8, length: int = 64,
    unlike: bool = False,
) -> Task:  # fmt: skip
    """Return the task: 0.13 M parameters by default; an inner step is `batch` sequences of `length` bytes."""
    shape = Shape(width, layers, heads, hidden, context=length)

    def draw_batches(draw: BatchDraw) -> Iterator[Batch]:
        text = _text_of(draw.cluster, draw.clusters) if unlike else load_corpus(CORPUS_SEED).training
        rng = Random(f"{draw.seed}/batches/{draw.cluster}/{draw.stream}")
        while True:
            rows = [
                text[rng.randrange(len(text)), at : at + length + 1]
                for at in (rng.randrange(BLOCK_BYTES - length) for _ in range(batch))
            ]
            yield _split(torch.from_numpy(np.stack(rows).astype(np.int64)))

    def validate(model: nn.Module) -> float:
        sample = load_corpus(CORPUS_SEED).validation_sample(VALIDATION_ROWS, length)
        with torch.no_grad():
            parts = [
                (float(_loss(model, _split(rows))), len(rows))
                for rows in torch.split(torch.from_numpy(sample.astype(np.int64)), VALIDATION_BATCH)
            ]
        return sum(loss * rows for loss, rows in parts) / len(sample)

    return Task(lambda: Decoder(shape), draw_batches, _loss, validate, batch * length, "nats per byte")


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the next byte."""
    inputs, targets = batch
    logits = model(inputs)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _split(rows: Tensor) -> Batch:
    return rows[:, :-1], rows[:, 1:]


@cache
def _text_of(cluster: int, clusters: int) -> Text:
    """Return a cluster's own part of the files, in the order of their names, so that directories stay together."""
    files = source_files(Path(sysconfig.get_paths()["stdlib"]))
    share = files[cluster * len(files) // clusters : (cluster + 1) * len(files) // clusters]
    return from_files(share, CORPUS_SEED).training
