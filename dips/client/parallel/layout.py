"""The plan for a model: chooses the adapter for the model, and gathers the layouts of all ranks on each.

Collective. A rank whose model is not supported reports it to all, so all raise the same error and none waits.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from dips.client.parallel.adapter import Adapter, HeldParameter, TensorBlock, check_copies, check_found, check_in_memory
from dips.client.parallel.devices import merge_tied
from dips.client.parallel.plan import (
    SPREAD_ITEMS,
    GatherMessages,
    Holding,
    RankLayout,
    TransferPlan,
    gather_layouts,
    make_plan,
)
from dips.client.parallel.rect import Rect
from dips.client.parallel.shard_buffer import find_replicas
from dips.client.parallel.tensors import TorchAdapter, plain_name
from dips.errors import ConfigError
from dips.protocol.grouping import PLAIN_GROUPING, Grouping
from dips.protocol.manifest import Manifest
from dips.protocol.rank_keys import TRANSFER_RANKS

SUPPORTED = "plain, DDP, FSDP2 and HSDP (fully_shard), tensor parallel by DTensor, Megatron-core"

# Classes that no adapter supports, by module and name, and the advice for each.
FOREIGN = {
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): "FSDP1 flattens parameters; use fully_shard (FSDP2)",
    ("deepspeed", "DeepSpeedEngine"): "DeepSpeed partitions parameters on its own; use fully_shard (FSDP2)",
    ("megatron.core.distributed.fsdp", "FullyShardedDataParallel"): "use Megatron's distributed optimizer",
}


@dataclass(frozen=True)
class ModelLayout:
    """A model as this rank holds it, and this rank's part in its transfer."""

    adapter: Adapter
    held: list[HeldParameter]
    plan: TransferPlan


def lay_out(
    model: nn.Module | Sequence[nn.Module],
    collectives: GatherMessages,
    optimizer: Any = None,
    max_transfer_ranks: int = TRANSFER_RANKS,
    spread_items: int = SPREAD_ITEMS,
    grouping: Grouping = PLAIN_GROUPING,
) -> ModelLayout:
    """Lay out the model of a job. Collective: every rank calls this with its own part.

    grouping  of its parameters, and of the shared buffers
    Errors    ConfigError, the same on every rank: no adapter supports the model or a parameter of it, or the ranks hold
              different models
    """
    adapter, held, problem = _describe_model(model, optimizer, grouping.share_buffers)
    claims = ((h.name, Holding(h.shape, _rects_of(h.reads), _rects_of(h.writes))) for h in held)
    own = RankLayout.from_claims(claims, socket.gethostname(), adapter is not None and adapter.staged)
    ranks, by_rank = gather_layouts(own, problem, collectives)
    problems = [f"rank {rank}: {one}" for rank, one in enumerate(by_rank) if one]
    if problems:
        raise ConfigError(problem if len(set(by_rank)) == 1 else "; ".join(problems[:5]))
    assert adapter is not None
    plan = make_plan(ranks, collectives.rank, max_transfer_ranks, spread_items, grouping)
    check_found(plan.manifest, grouping.share_buffers)
    return ModelLayout(adapter, held, replace(plan, replicas=find_replicas(ranks)))


def choose_adapter(
    model: nn.Module | Sequence[nn.Module], optimizer: Any = None, share_buffers: Collection[str] = ()
) -> Adapter:
    """Return the adapter for this model. Raises ConfigError naming what was found and what is supported."""
    parts = [model] if isinstance(model, nn.Module) else list(model)
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        seen = ", ".join(type(part).__name__ for part in parts) or "an empty list"
        raise ConfigError(f"expected a torch.nn.Module or a list of them, got {seen}; supported: {SUPPORTED}")
    classes = {cls for part in parts for module in part.modules() for cls in type(module).__mro__}
    for (package, name), instead in FOREIGN.items():
        if any(cls.__name__ == name and cls.__module__.startswith(package) for cls in classes):
            raise ConfigError(f"the model holds a {package}.{name}: {instead}; supported: {SUPPORTED}")
    if any(hasattr(p, "ds_id") for part in parts for p in part.parameters()):
        raise ConfigError(
            f"the parameters are partitioned by DeepSpeed ZeRO-3; use fully_shard (FSDP2); supported: {SUPPORTED}"
        )
    if any(hasattr(p, "_hp_mapping") for part in parts for p in part.parameters()):
        raise ConfigError(
            "DeepSpeed ZeRO keeps fp32 masters of these parameters in partitions of its own, which would undo every "
            f"pull; use fully_shard (FSDP2); supported: {SUPPORTED}"
        )
    if any(cls.__module__.startswith("megatron.core.") for cls in classes):
        from dips.client.parallel.megatron import MegatronAdapter  # imports megatron, an optional dependency

        return MegatronAdapter(parts, optimizer, share_buffers)
    return TorchAdapter(parts, not isinstance(model, nn.Module), optimizer, share_buffers)


def full_parameters(model: nn.Module, share_buffers: Collection[str] = ()) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the full trainable parameters of a model that is whole on this process, with the shared buffers, and the
    names of its frozen parameters.

    Raises ConfigError if a part of it is elsewhere.
    """
    adapter = choose_adapter(model, share_buffers=share_buffers)
    found = {}
    for held in adapter.held_parameters():
        flat = torch.cat([block.view.reshape(-1) for block in held.reads]) if held.reads else torch.empty(0)
        if flat.numel() != prod(held.shape):
            raise ConfigError(f"{held.name}: {flat.numel()} of its {prod(held.shape)} elements lie on this process")
        found[held.name] = flat.view(held.shape)
    grouping = Grouping(share_buffers=tuple(share_buffers))
    check_found(Manifest.from_shapes(((n, tuple(t.shape)) for n, t in found.items()), grouping), share_buffers)
    return found, [plain_name(name) for name, p in model.named_parameters() if not p.requires_grad]


def _describe_model(
    model: Any, optimizer: Any, share_buffers: Collection[str]
) -> tuple[Adapter | None, list[HeldParameter], str]:
    try:
        adapter = choose_adapter(model, optimizer, share_buffers)
        held = adapter.held_parameters()
        check_in_memory(held)
        check_copies(held)
        return adapter, merge_tied(held), ""
    except ConfigError as error:
        return None, [], str(error)


def _rects_of(blocks: Sequence[TensorBlock]) -> tuple[Rect, ...]:
    return tuple(block.rect for block in blocks)
