"""Train a tiny GPT of Megatron-core in any TP × PP × data parallel; what Di-PS adds is marked on the right.

    dips init --config dips.yaml --factory megatron_gpt:build --seed 1        # in this directory
    dips-client --config cluster.yaml -- torchrun --nproc-per-node 4 megatron_gpt.py --tp 2 --pp 2

Clusters may differ in TP, PP and data parallel: names and shapes are those of the model on one rank. The vocabulary
must be padded to the same size in all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from dips.client import OuterLoop  # 1

VOCABULARY, LENGTH, SEQUENCES, MICROBATCHES = 64, 16, 4, 2


def build() -> nn.Module:
    """The whole model on one process, for `dips init --factory`."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mpu.initialize_model_parallel()
        initialize_rng_tracker(inference_rng_tracker=True)
    return stage()


def stage() -> GPTModel:
    """This rank's stage of the pipeline."""
    tp, pp = mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=4, hidden_size=32, ffn_hidden_size=88, num_attention_heads=4, num_query_groups=2,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=nn.functional.silu, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, use_cpu_initialization=True, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope", share_embeddings_and_output_weights=True,
    )  # fmt: skip


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Train until the run is over; return the losses, and a digest of each parameter of this rank's stage."""
    args = _arguments(words)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mpu.initialize_model_parallel(args.tp, args.pp)
    initialize_rng_tracker(inference_rng_tracker=True)
    part = stage().to("cuda" if torch.cuda.is_available() else "cpu")
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(part.config, ddp, part)
    part.config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=args.lr, use_distributed_optimizer=True, clip_grad=1.0), [model]
    )
    tokens = SEQUENCES * LENGTH * MICROBATCHES * mpu.get_data_parallel_world_size()
    data, losses = batches(args.seed * 1000 + mpu.get_data_parallel_rank()), list[float]()
    with OuterLoop(model, optimizer=optimizer) as outer:  # 2
        while not outer.finished:
            loss = inner_step(model, optimizer, data)
            if loss is not None:
                losses.append(loss)
            outer.step(tokens=tokens, loss=loss)  # 3
    return {"losses": losses, "stage": {name: _digest(p) for name, p in part.named_parameters()}}


def inner_step(model: nn.Module, optimizer: Any, data: Iterator[torch.Tensor]) -> float | None:
    """One step by Megatron's own schedule; the loss on the last stage, None elsewhere."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    found = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=data, model=[model], num_microbatches=MICROBATCHES,
        seq_length=LENGTH, micro_batch_size=SEQUENCES, forward_only=False,
    )  # fmt: skip
    optimizer.step()
    return sum(float(one["loss"]) for one in found) / len(found) if found else None


def forward(data: Iterator[torch.Tensor], model: nn.Module) -> Any:
    tokens = next(data).to(next(model.parameters()).device)
    places = torch.arange(LENGTH, device=tokens.device)[None].expand(SEQUENCES, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, device=tokens.device), 1).bool()
    out = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])
    return out, lambda o: (o.mean(), {"loss": o.detach().mean()})


def batches(seed: int) -> Iterator[torch.Tensor]:
    """Sequences that count up from anywhere, by 1 to 4: int64 [SEQUENCES, LENGTH + 1]."""
    data = torch.Generator().manual_seed(seed)
    while True:
        begin = torch.randint(0, VOCABULARY, (SEQUENCES, 1), generator=data)
        step = torch.randint(1, 5, (SEQUENCES, 1), generator=data)
        yield (begin + step * torch.arange(LENGTH + 1)) % VOCABULARY


def _digest(parameter: torch.Tensor) -> str:
    return hashlib.sha256(parameter.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1, help="of the data; another one in each cluster")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
