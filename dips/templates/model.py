"""The model of this run. `dips up` (or `dips init --factory model:build`) calls build() once for the first version."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BYTES, WIDTH, LAYERS, HEADS, LENGTH = 256, 96, 2, 4, 96


class ByteModel(nn.Module):
    """A small GPT over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:  # int64 [batch, time] → float32 [batch, time, BYTES]
        time = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=text.device)
        x = self.embedding(text) + self.positions(torch.arange(time, device=text.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.output(self.norm(x))


def build() -> ByteModel:
    return ByteModel()
