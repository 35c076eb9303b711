"""Real Megatron-core on the ranks of one torchrun, in several layouts one after the other, against one known model.

torchrun --nproc-per-node 4 check_megatron.py OUT dense [--device cuda]       writes OUT.RANK as JSON
torchrun --nproc-per-node 2 check_megatron.py OUT experts [--device cuda]     likewise, of a mixture of experts

Each layout receives the same full parameters and must hold on every rank exactly what Megatron's own way of cutting
gives for that rank, push the same numbers back, and compute the loss that one rank computes with the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import layouts
import megatron_layouts as tiny
import numpy as np
import torch
from check_layouts import on_this_rank, pull, read_words, whole_theta
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import nn

from dips.client.parallel import HostMemory, lay_out
from dips.client.rank.agent_client import JobCollectives
from dips.protocol.grouping import Grouping

TIED = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Way:
    tp: int
    pp: int
    vpp: int | None = None
    bf16: bool = False
    distributed: bool = False
    experts: bool = False
    ep: int = 1
    etp: int | None = None


DENSE = {
    "tp1": Way(1, 1),
    "tp2 pp2": Way(2, 2),
    "pp2 vpp2": Way(1, 2, 2, distributed=True),
    "tp2, bf16, distributed optimizer": Way(2, 1, bf16=True, distributed=True),
    "tp1, bf16": Way(1, 1, bf16=True),
}
EXPERTS = {
    "dp2": Way(1, 1, experts=True),
    "ep2": Way(1, 1, experts=True, ep=2),
    "pp2": Way(1, 2, experts=True),
    "ep2, bf16, distributed optimizer": Way(1, 1, bf16=True, distributed=True, experts=True, ep=2),
    "tp2 ep2": Way(2, 1, experts=True, ep=2, etp=1),
    "tp2 etp2": Way(2, 1, distributed=True, experts=True, etp=2),
}
SHARED = ("*.expert_bias",)  # beside the parameters


def theta_of(manifest: Any, scale: float) -> dict[str, np.ndarray]:
    """Full parameters that everybody can make: norms near 1, the rest small; more digits than bf16 holds."""
    rng = np.random.default_rng(7)
    theta = {}
    for layer in manifest.layers:
        for p in layer.parameters:
            noise = rng.standard_normal(p.shape).astype(np.float32) * np.float32(scale)
            theta[p.name] = noise + np.float32("norm" in p.name)
    return theta


def expected(way: Way, parts: list[nn.Module], theta: dict[str, np.ndarray]) -> Iterator[tuple[nn.Parameter, Any]]:
    """Every parameter of this rank, and what Megatron's own rule cuts out of the full one for it."""
    tp_rank, pp_rank = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    each = tiny.LAYERS // way.pp // (way.vpp or 1)
    for stage, part in enumerate(parts):
        for path, parameter in part.named_parameters():
            words = path.split(".")
            if words[:2] == ["decoder", "layers"]:
                words[2] = str(int(words[2]) + (stage * way.pp + pp_rank) * each)
            tp, at = way.tp, tp_rank
            if "local_experts" in words:
                words[6] = str(int(words[6]) + mpu.get_expert_model_parallel_rank() * tiny.EXPERTS // way.ep)
                tp, at = way.etp or way.tp, mpu.get_expert_tensor_parallel_rank()
            name = TIED if path == "output_layer.weight" else ".".join(words)
            full = torch.from_numpy(theta[name]).to(parameter.device)
            if way.tp > 1 and getattr(parameter, "tensor_model_parallel", False):
                dim, stride = parameter.partition_dim, parameter.partition_stride
                full = torch.cat([block.chunk(tp, dim)[at] for block in full.chunk(stride, dim)], dim)
            yield parameter, full
        for path, buffer in part.named_buffers():
            if path.endswith(".expert_bias"):
                words = path.split(".")
                words[2] = str(int(words[2]) + (stage * way.pp + pp_rank) * each)
                yield buffer, torch.from_numpy(theta[".".join(words)]).to(buffer.device)


def loss_of(parts: list[nn.Module]) -> float:
    """The loss on one fixed batch, by Megatron's own schedule; NaN where this rank is not the last stage."""
    tokens = torch.randint(0, tiny.VOCABULARY, (2, tiny.LENGTH + 1), generator=torch.Generator().manual_seed(3))
    tokens = tokens.to(layouts.device)
    places = torch.arange(tiny.LENGTH, device=layouts.device)[None].expand(2, -1)
    mask = torch.triu(torch.ones(1, 1, tiny.LENGTH, tiny.LENGTH, device=layouts.device), 1).bool()

    def forward(_: Any, model: nn.Module) -> Any:
        out = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])
        return out, lambda o: (o.float().mean(), {"loss": o.detach().float().mean()})

    data: Any = [iter([None] * 8) for _ in parts]
    found = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=data if len(parts) > 1 else data[0], model=parts,
        num_microbatches=mpu.get_pipeline_model_parallel_world_size(), seq_length=tiny.LENGTH, micro_batch_size=2,
        forward_only=True,
    )  # fmt: skip
    return float(found[0]["loss"]) if found else float("nan")


def step_without_moving(parts: list[nn.Module], optimizer: Any) -> None:
    """One step at learning rate 0: what the optimizer holds comes back into the parameters."""
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    for part in parts:
        for p in part.parameters():
            p.main_grad.fill_(1e-3)
    optimizer.step()


def check(way: Way, collectives: JobCollectives) -> dict[str, Any]:
    tiny.start(way.tp, way.pp, way.vpp, way.ep, way.etp, layouts.device)
    torch.manual_seed(collectives.rank)  # every rank begins with numbers of its own: only a pull can make them right
    parts = tiny.chunks(
        tied=True, dtype=torch.bfloat16 if way.bf16 else torch.float32, vpp=way.vpp, experts=way.experts
    )
    parts = [part.to(layouts.device) for part in parts]
    models, optimizer = tiny.wrapped(parts, way.distributed)
    layout = lay_out(
        models, collectives, optimizer, spread_items=64, grouping=Grouping(share_buffers=SHARED if way.experts else ())
    )
    memory = HostMemory(layout.adapter, layout.held, layout.plan, collectives)
    wrong: dict[str, int] = {}
    for round_, scale in enumerate((0.02, 0.03)):
        theta = theta_of(layout.plan.manifest, scale)
        pull(layout, memory, theta)
        for when in ("pull", "step"):
            found = [(p, full.to(p.dtype)) for p, full in expected(way, parts, theta)]
            wrong[f"{when} {round_}"] = sum(not torch.equal(p.detach(), full) for p, full in found)
            memory.gather_pieces()
            pushed = whole_theta(collectives, layout, memory)
            wrong[f"push after {when} {round_}"] = sum(
                not np.array_equal(pushed[name], full.reshape(-1)) for name, full in theta.items()
            )
            if when == "pull":
                step_without_moving(parts, optimizer)
    found = {
        "way": asdict(way),
        "digest": layout.plan.manifest.digest,
        "wrong": wrong,
        # Megatron's experts want sequence parallelism beside TP, which its norms without Transformer Engine have not.
        "loss": float("nan") if way.experts and way.tp > 1 else loss_of(models),
        "moved": sum(piece.length for piece in memory.pieces),
        "host": memory.allocated_numel,
        "held": sum(block.view.numel() for held in layout.held for block in held.writes),
        "parameters": layout.plan.manifest.numel,
    }
    mpu.destroy_model_parallel()
    return found


if __name__ == "__main__":
    out, (kind,), device = read_words()
    on_this_rank(check, {"dense": DENSE, "experts": EXPERTS}[kind], out, device)
