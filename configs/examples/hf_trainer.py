"""Hugging Face's Trainer on a tiny Llama; the two lines that Di-PS adds are marked on the right.

    dips init --config dips.yaml --factory hf_trainer:build --seed 1        # in this directory
    dips-client --config cluster.yaml -- torchrun --nproc-per-node 2 hf_trainer.py

The data are counted sequences; take your own dataset and tokenizer as with any Trainer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dips.client.transformers import OuterCallback  # 1

LENGTH, VOCABULARY = 32, 128


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


def main(words: Sequence[str] | None = None) -> Trainer:
    """Train until the run is over, or for --steps; return the Trainer."""
    args = _arguments(words)
    with tempfile.TemporaryDirectory() as out:
        training = TrainingArguments(
            output_dir=out, max_steps=args.steps, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=2,
            include_num_input_tokens_seen=True, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
        )  # fmt: skip
        trainer = Trainer(model=build(), args=training, train_dataset=Counting(), callbacks=[OuterCallback()])  # 2
        trainer.train()
    return trainer


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="at most so many")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
