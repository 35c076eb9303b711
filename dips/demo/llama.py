"""The demo's model as transformers' Llama: `dips export --format hf --convert dips.demo.llama:convert`.

Both compute the same function; the names differ, and the demo has queries, keys and values in one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dips.demo.model import BYTES, NORM_EPS, Shape

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# Names in each layer: the demo's → Llama's.
_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wo": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
_WHOLE = {"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}


def convert(theta: Mapping[str, Tensor], shape: Shape | None = None) -> LlamaForCausalLM:
    """Make a Llama from the demo's parameters by name. Raises KeyError or RuntimeError if they are of another model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = shape or Shape()  # its rotary base, 10,000, is Llama's default
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=shape.width,
            intermediate_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            max_position_embeddings=shape.context,
            rms_norm_eps=NORM_EPS,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model.load_state_dict(_rename(theta, shape.layers))
    return model


def _rename(theta: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    named = {f"{theirs}.weight": theta[f"{ours}.weight"] for ours, theirs in _WHOLE.items()}
    for number in range(layers):
        ours, theirs = f"layers.{number}", f"model.layers.{number}"
        named |= {f"{theirs}.{b}.weight": theta[f"{ours}.{a}.weight"] for a, b in _LAYER.items()}
        parts = torch.chunk(theta[f"{ours}.attention.wqkv.weight"], 3)
        named |= {f"{theirs}.self_attn.{k}_proj.weight": part.clone() for k, part in zip("qkv", parts, strict=True)}
    return named
