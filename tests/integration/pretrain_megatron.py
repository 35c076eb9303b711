"""Megatron-LM's own `pretrain` as a cluster of a run, on CPU: its loop, schedule, optimizer, mock data, checkpoints.

    pretrain_megatron.py start OUT.npz          the parameters that the run begins with
    pretrain_megatron.py train OUT [ARGUMENTS]  under torchrun and an agent; writes OUT.RANK as JSON

Stand-ins only for CUDA where it is called by name. The first start breaks off after BREAKS_AT iterations. Megatron-LM's
source is beside the interpreter: <environment>/megatron-lm.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import megatron_layouts as tiny
import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(sys.prefix) / "megatron-lm"))
SAVED_EVERY, BREAKS_AT = 4, 10
ARGUMENTS = shlex.split("""
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--position-embedding-type rope --no-rope-fusion --micro-batch-size 2 --global-batch-size 8 --train-iters 1000
--lr 3e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 64
--transformer-impl local --use-cpu-initialization --distributed-backend gloo --no-persist-layer-norm
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --eval-interval 1000000 --split 100,0,0
--ckpt-format torch --no-load-rng
""")


class NoStream:
    """Of CUDA's streams and events: nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def stand_in() -> None:
    """CUDA's functions that the loop calls by name."""
    tiny.shim()
    nothing = {"set_device", "manual_seed", "empty_cache", "set_rng_state", "check_error"}
    numbers = {"memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"}
    values: dict[str, Any] = {
        "is_available": True, "is_initialized": False, "device_count": 1, "get_device_capability": (8, 0),
        "current_stream": NoStream(), "stream": NoStream(), "get_rng_state": torch.get_rng_state(),
        **dict.fromkeys(nothing), **dict.fromkeys(numbers, 0),
    }  # fmt: skip
    for name, value in values.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.Stream = torch.cuda.Event = NoStream  # type: ignore[misc,assignment]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_, **__: None  # type: ignore[assignment]


def main(mode: str, out: Path, words: list[str]) -> None:
    stand_in()
    sys.argv[1:] = [*ARGUMENTS, *words]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import random
    from megatron.training import initialize, training

    random.initialize_rng_tracker(inference_rng_tracker=True)
    initialize._compile_dependencies = initialize.set_jit_fusion_options = lambda: None
    training.set_jit_fusion_options = lambda: None
    import pretrain_gpt

    provider = partial(pretrain_gpt.model_provider, pretrain_gpt.gpt_builder)
    if mode == "start":
        from dips.client.parallel import full_parameters

        initialize.initialize_megatron()
        (model,) = training.get_model(provider, ModelType.encoder_or_decoder)
        np.savez(out, **{name: tensor.numpy() for name, tensor in full_parameters(model)[0].items()})
        return
    pretrain_gpt.train_valid_test_datasets_provider.is_distributed = True
    train(out, training, [pretrain_gpt.train_valid_test_datasets_provider, provider, ModelType.encoder_or_decoder,
                          pretrain_gpt.forward_step])  # fmt: skip


def train(out: Path, training: Any, words: list[Any]) -> None:
    from dips.client import OuterLoop
    from dips.client.megatron import OuterPretrain
    from dips.client.parallel.layout import choose_adapter

    found: dict[str, Any] = {"losses": [], "remarks": []}
    say, own, first = OuterLoop.remark, training.train_step, out.with_name("broken-off")
    OuterLoop.remark = lambda self, text: (found["remarks"].append(text), say(self, text))[1]  # type: ignore[method-assign]

    def step(data: Any, iterator: Any, model: Any, optimizer: Any, *rest: Any, iteration: int) -> Any:
        if iteration == BREAKS_AT and not first.exists():
            dist.barrier()
            first.touch()
            os._exit(1)
        made = own(data, iterator, model, optimizer, *rest, iteration=iteration)
        found["losses"] += [float(loss) for loss in made[0].values()]
        found["iteration"], found["model"] = iteration, model
        return made

    training.train_step = step
    try:
        with OuterPretrain():
            training.pretrain(*words)
    except SystemExit as end:
        found["exit"] = end.code
    held = choose_adapter(found.pop("model")).local_tensors()
    found["theta"] = {name: memory.reshape(-1)[:4].tolist() for name, _, memory in held}
    out.with_name(f"{out.name}.{os.environ['RANK']}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
