"""Hugging Face's Trainer on a tiny Llama; the three lines that Di-PS adds are marked on the right.

    dips init --config dips.yaml --factory hf_trainer:build --seed 1        # in this directory
    dips-client --config cluster.yaml -- torchrun --nproc-per-node 2 hf_trainer.py --out runs/west

The data are counted sequences, or the bytes of a file; take your own data set and tokenizer as with any Trainer. With
`shared.data.ranges` all clusters share the rows of one data set. Started again, it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from dips.client.transformers import OuterCallback, lease_ranges  # 1

LENGTH, VOCABULARY = 64, 256


def build() -> LlamaForCausalLM:
    """The model of `dips init --factory`."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from anywhere, by 1 to 4."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        data = torch.Generator().manual_seed(index)
        begin, step = (int(torch.randint(low, high, (), generator=data)) for low, high in ((0, VOCABULARY), (1, 5)))
        tokens = (begin + step * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Text(Dataset[dict[str, torch.Tensor]]):
    """The bytes of a file, LENGTH at a time."""

    def __init__(self, path: Path, rows: int | None) -> None:
        self._bytes = np.memmap(path, np.uint8, "r")
        self._rows = min(rows or len(self._bytes), len(self._bytes) // LENGTH)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self._bytes[index * LENGTH : (index + 1) * LENGTH].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next byte; int64 [rows, at most LENGTH]."""
    loss: torch.Tensor = model(input_ids=rows, labels=rows).loss
    return loss


def main(words: Sequence[str] | None = None) -> Trainer:
    """Train until the run is over; return the Trainer."""
    args = _arguments(words)
    with tempfile.TemporaryDirectory() as scratch:
        training = TrainingArguments(
            output_dir=str(args.out or scratch), per_device_train_batch_size=args.rows, learning_rate=args.lr,
            lr_scheduler_type="cosine", warmup_steps=args.warmup, logging_steps=2, seed=args.seed,
            save_strategy="steps" if args.out else "no", save_steps=args.save_steps, save_total_limit=2,
            report_to=[], disable_tqdm=True, use_cpu=not torch.accelerator.is_available(),
        )  # fmt: skip
        outer = OuterCallback()
        data = Text(args.text, args.text_rows) if args.text else Counting()
        trainer = Trainer(model=build(), args=training, train_dataset=data, callbacks=[outer])  # 2
        lease_ranges(trainer, outer)  # 3
        trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if args.out and args.out.exists() else None)
    return trainer


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file to train on; none: counted sequences")
    parser.add_argument("--text-rows", type=int, help="of the text at most so many rows")
    parser.add_argument("--out", type=Path, help="where checkpoints go; none: nothing is saved")
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4, help="of each rank in an inner step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=0, help="steps")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the data; another one in each cluster")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
