"""A Llama-style decoder over bytes: RMSNorm, rotary embeddings, SwiGLU. Small enough for two CPU cores.

The only model of this project: demo, tests and benchmarks build it with different `Shape`s. Plain torch; its blocks are
named `layers.N`, by which `fully_shard(block)` shards them and the manifest groups their parameters.
Shapes in comments: B sequences, T bytes each, D width, H heads, K = D/H width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as f

BYTES = 256  # the vocabulary
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the model; the default has 1.1 M parameters."""

    width: int = 128
    layers: int = 5
    heads: int = 4
    hidden: int = 352  # width of SwiGLU, about 8/3 of the model's width
    context: int = 512  # longest sequence, in bytes

    def __post_init__(self) -> None:
        assert self.width % self.heads == 0 and (self.width // self.heads) % 2 == 0


class Norm(nn.Module):
    """RMSNorm: x/rms(x), scaled by a learned weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:  # [..., D] → [..., D]
        return f.rms_norm(x, self.weight.shape, self.weight, eps=NORM_EPS)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.wqkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:  # [B, T, D] → [B, T, D]
        b, t, d = x.shape
        q, k, v = self.wqkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)  # each [B, H, T, K]
        out = f.scaled_dot_product_attention(rotate_pairs(q, rotation), rotate_pairs(k, rotation), v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, t, d))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) · w3 x)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] → [B, T, D]
        return self.w2(f.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each on a normed copy, added back."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(shape.width), Attention(shape)
        self.feed_forward_norm, self.feed_forward = Norm(shape.width), FeedForward(shape)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:  # [B, T, D] → [B, T, D]
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """A decoder from bytes to logits of the next byte."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape or Shape()
        self.embedding = nn.Embedding(BYTES, self.shape.width)
        self.layers = nn.ModuleList(Block(self.shape) for _ in range(self.shape.layers))
        self.norm = Norm(self.shape.width)
        self.output = nn.Linear(self.shape.width, BYTES, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw θ from torch's generator: N(0, 0.02²), with smaller deviations, by depth, for layers that add to the
        residual.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.shape.layers) ** 0.5 if deep else 0.02)

    def forward(self, text: Tensor) -> Tensor:  # int64 [B, T] → float32 [B, T, BYTES]
        x = self.embedding(text)
        rotation = rotary_angles(text.shape[1], self.shape.width // self.shape.heads, x.device)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.output(self.norm(x))


def rotary_angles(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, two tensors [T, K/2]; computed, so that θ holds parameters
    only.
    """
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x_i, x_{i+K/2}) by its position's angle: [B, H, T, K] → [B, H, T, K]."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def loss_of(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the mean cross entropy of the next byte in nats per byte; sequences int64 [B, T+1]."""
    return next_byte_loss(model(sequences[:, :-1]), sequences)


def next_byte_loss(logits: Tensor, sequences: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte; logits [B, T, BYTES] for all bytes but the last."""
    return f.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def build() -> Decoder:
    """Make the demo's model: `dips init --factory dips.demo.model:build --seed N`."""
    return Decoder()
