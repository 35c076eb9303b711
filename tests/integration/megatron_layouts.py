"""A tiny Megatron-core GPT on CPU and gloo, in any TP × PP × virtual stages × data parallel, for the scripts here.

The shim stands in for CUDA where megatron-core asks for it by name: the framework itself is the real one.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")

VOCABULARY, WIDTH, LAYERS, LENGTH, EXPERTS = 64, 32, 4, 16, 4


class _CpuAsCuda(TorchFunctionMode):
    """Tensors that megatron-core wants on CUDA are made on the CPU; types are spelled as it expects them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


@cache
def shim() -> None:
    """Let megatron-core run without a GPU and without a compiler of C++, for the rest of this process."""
    torch.compiler.set_stance("force_eager")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # Transformer Engine's, asked for by name without it
    _CpuAsCuda().__enter__()


def start(
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Initialise Megatron's groups; torch.distributed is initialised by the caller. `device`: by default the CPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(
        tp, pp, vpp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    random.initialize_rng_tracker(inference_rng_tracker=True)
    if device is None or device.type == "cpu":
        shim()


def chunks(
    tied: bool, dtype: torch.dtype = torch.float32, vpp: int | None = None, experts: bool = False
) -> list[nn.Module]:
    """This rank's part of the model: one chunk, or one for each virtual stage; of experts, or dense."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp, mixture = mpu.get_tensor_model_parallel_world_size(), {}
    if experts:
        mixture = {
            "num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 44, "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none", "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True, "moe_token_dispatcher_type": "allgather",
            "moe_shared_expert_intermediate_size": 24,
            "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": mpu.get_expert_tensor_parallel_world_size(),
        }  # fmt: skip
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, ffn_hidden_size=44, num_attention_heads=4, num_query_groups=2,
        use_cpu_initialization=True, normalization="RMSNorm", gated_linear_unit=True, bf16=dtype is torch.bfloat16,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, add_qkv_bias=True, attention_dropout=0.0,
        hidden_dropout=0.0, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(), pipeline_dtype=dtype,
        virtual_pipeline_model_parallel_size=vpp, params_dtype=dtype, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, **mixture,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS if experts else None, normalization="RMSNorm")
    made = []
    for stage in range(vpp or 1):
        at = {"vp_stage": stage if vpp else None, "ignore_virtual": vpp is None}
        model = GPTModel(
            config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type="rope",
            pre_process=mpu.is_pipeline_first_stage(**at), post_process=mpu.is_pipeline_last_stage(**at),
            share_embeddings_and_output_weights=tied, vp_stage=at["vp_stage"],
        )  # fmt: skip
        made.append(model.to(dtype))
    return made


def wrapped(parts: list[nn.Module], distributed: bool, lr: float = 1e-3) -> tuple[list[nn.Module], Any]:
    """Megatron's data parallel around the chunks, and its optimizer, distributed or not."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = parts[0].config
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=False)
    outer = [DistributedDataParallel(config, ddp, part) for part in parts]
    options = OptimizerConfig(
        optimizer="adam", lr=lr, use_distributed_optimizer=distributed, bf16=config.bf16,
        params_dtype=config.params_dtype, clip_grad=1.0,
    )  # fmt: skip
    return outer, get_megatron_optimizer(options, outer)


def build() -> nn.Module:
    """The whole model on one process, for `dips init --factory`."""
    import torch.distributed as dist

    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        start()
    return chunks(tied=True)[0]
