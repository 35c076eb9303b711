"""The names and shapes of a model of 50,000 tensors: DeepSeek-V3, with 67 layers instead of 61.

740 billion elements, which nothing here allocates.
"""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[str, tuple[int, ...]]

LAYERS, DENSE_LAYERS, EXPERTS = 67, 3, 256
HIDDEN, VOCABULARY = 7168, 129_280
DENSE_WIDTH, EXPERT_WIDTH = 18_432, 2048
SHRINK = 512  # of every dimension
ATTENTION = {
    "q_a_proj": (1536, HIDDEN),
    "q_a_layernorm": (1536,),
    "q_b_proj": (24_576, 1536),
    "kv_a_proj_with_mqa": (576, HIDDEN),
    "kv_a_layernorm": (512,),
    "kv_b_proj": (32_768, 512),
    "o_proj": (HIDDEN, 16_384),
}


def large_shapes() -> Iterator[Shape]:
    """Yield every parameter's name and shape."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        yield from _layer_shapes(f"model.layers.{layer}", 0 if layer < DENSE_LAYERS else EXPERTS)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def small_shapes() -> Iterator[Shape]:
    """As many parameters of the same names, so small that a machine can hold them: 12 MB in all."""
    for name, shape in large_shapes():
        yield name, tuple(max(1, dim // SHRINK) for dim in shape)


def _layer_shapes(layer: str, experts: int) -> Iterator[Shape]:
    for name, shape in ATTENTION.items():
        yield f"{layer}.self_attn.{name}.weight", shape
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer}.{norm}.weight", (HIDDEN,)
    if not experts:
        yield from _mlp_shapes(f"{layer}.mlp", DENSE_WIDTH)
        return
    yield f"{layer}.mlp.gate.weight", (experts, HIDDEN)
    yield f"{layer}.mlp.gate.e_score_correction_bias", (experts,)
    yield from _mlp_shapes(f"{layer}.mlp.shared_experts", EXPERT_WIDTH)
    for expert in range(experts):
        yield from _mlp_shapes(f"{layer}.mlp.experts.{expert}", EXPERT_WIDTH)


def _mlp_shapes(prefix: str, width: int) -> Iterator[Shape]:
    for name, shape in (("gate_proj", (width, HIDDEN)), ("up_proj", (width, HIDDEN)), ("down_proj", (HIDDEN, width))):
        yield f"{prefix}.{name}.weight", shape
