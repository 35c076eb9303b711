"""Released torchtitan on CPU and gloo: its own Trainer, of small dense and expert models, for the scripts here.

Stand-ins, all for what only accelerators and newer builds of torch have: the device and its memory's monitor, the
backward of FlexAttention, NCCL's scaled sums, new timeouts of groups. The trainer, its models, their
parallelism, optimizers and checkpoints are the released ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._utils

warnings.filterwarnings("ignore")
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: torch.cpu if kind == "cpu" else getattr(torch, kind)

import torchtitan.components.metrics as titan_metrics  # noqa: E402 (after the device)
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.distributed import utils as titan_utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

VOCABULARY, LENGTH, SEQUENCES, EXPERTS = 2048, 16, 2, 4


class NoMonitor:
    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return titan_metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def attend(q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, **_: Any) -> tuple[Any, None]:
    dense = torch.nn.functional.scaled_dot_product_attention
    return dense(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


titan_metrics.build_device_memory_monitor = NoMonitor
FlexAttention.compiled_flex_attn = staticmethod(attend)
titan_utils.set_pg_timeouts = lambda **_: None


class CountingLoader:
    """Sequences that count up, in place of a data loader: those of rank r and run of the loader s are always equal."""

    def build(self, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> CountingLoader:
        self._data = torch.Generator().manual_seed(dp_rank)
        self._shape = (local_batch_size, seq_len)
        return self

    def __iter__(self) -> Iterator[Any]:
        while True:
            begin = torch.randint(0, 64, (self._shape[0], 1), generator=self._data)
            tokens = (begin + torch.arange(self._shape[1] + 1)) % 64
            places = torch.arange(self._shape[1]).expand(self._shape).contiguous()
            yield {"input": tokens[:, :-1].contiguous(), "positions": places}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class NoTokenizer:
    def build(self, **_: Any) -> None:
        return None


def make_config(folder: Path, experts: bool = False, ep: int = 1, steps: int = 1000) -> Any:
    """The configuration of torchtitan's own debug model, of two layers."""
    config = llama3_debugmodel()
    if experts:
        config.model_spec = _experts()
        config.loss.loss_fn.global_vocab_size = VOCABULARY
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.local_batch_size, config.training.seq_len, config.training.steps = SEQUENCES, LENGTH, steps
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    config.lr_scheduler.warmup_steps = 0
    config.validator.enable, config.activation_checkpoint = False, None
    config.parallelism.spmd_backend, config.parallelism.expert_parallel_degree = "partial_dtensor", ep
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.dataloader, config.tokenizer, config.dump_folder = CountingLoader(), NoTokenizer(), str(folder)
    return config


def make_trainer(config: Any) -> Any:
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return trainer


def _experts() -> Any:
    """Qwen 3's mixture of experts, small; with the bias that balances them."""
    from torchtitan.models import qwen3

    spec = qwen3.model_registry("debugmodel")
    spec.model.layers = qwen3._build_qwen3_moe_layers(
        fuse_qkv=True, n_layers=2, dim=256, n_heads=4, n_kv_heads=2, head_dim=32, moe_hidden_dim=32,
        num_experts=EXPERTS, top_k=2, attn_backend="flex",
        rope=qwen3.CosSinRoPE.Config(dim=32, max_seq_len=64, theta=1e6), moe_comm_backend="standard",
    )  # fmt: skip
    for layer in spec.model.layers:
        layer.moe.load_balance_coeff = 1e-2
    return spec
