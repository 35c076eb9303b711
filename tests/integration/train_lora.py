"""LoRA adapters of PEFT on a frozen tiny Llama, two micro-batches a step; rank 0 writes what it ended with.

    train_lora.py OUT loop|trainer SEED

`loop` has its optimizer's steps counted by the outer loop, `trainer` is transformers' own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from run_example import digest, meet
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dips.client import OuterLoop
from dips.client.transformers import OuterCallback

ROWS, LENGTH, VOCABULARY, MICRO_BATCHES = 4, 16, 32, 2


def build() -> nn.Module:
    """The same frozen base everywhere; of the adapters the outer loop brings the numbers."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=False,
    )  # fmt: skip
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"], lora_dropout=0.0)
    return get_peft_model(LlamaForCausalLM(config), lora)


def rows(seed: int, count: int) -> torch.Tensor:
    """Sequences that count up from anywhere."""
    begin = torch.randint(0, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    return (begin + torch.arange(LENGTH)) % VOCABULARY


def train_by_hand(model: nn.Module, seed: int) -> list[float]:
    """An ordinary loop that accumulates gradients; nowhere in it stands OuterLoop.step."""
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), list[float]()
    with OuterLoop(model) as outer:
        outer.follow_optimizer(optimizer, tokens=ROWS * LENGTH * MICRO_BATCHES, loss=lambda: losses[-1])
        while not outer.finished:
            total = 0.0
            for part in rows(seed * 1000 + len(losses), ROWS * MICRO_BATCHES).split(ROWS):
                loss = model(input_ids=part, labels=part).loss / MICRO_BATCHES
                loss.backward()
                total += loss.item()
            losses.append(total)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train_by_trainer(model: nn.Module, seed: int) -> list[float]:
    """The same by transformers."""
    data = [{"input_ids": row, "labels": row} for row in rows(seed, 4000)]
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out, per_device_train_batch_size=ROWS, gradient_accumulation_steps=MICRO_BATCHES, learning_rate=1e-2,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[OuterCallback()])  # type: ignore[arg-type]
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def main(out: Path, kind: str, seed: int) -> None:
    torch.set_num_threads(1)
    meet(out, 2)
    model = build()
    losses = (train_by_hand if kind == "loop" else train_by_trainer)(model, seed)
    base: dict[str, Any] = {n: digest(p) for n, p in model.named_parameters() if not p.requires_grad}
    theta = {n: digest(p) for n, p in model.named_parameters() if p.requires_grad}
    out.write_text(json.dumps({"losses": losses, "base": base, "theta": theta}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
