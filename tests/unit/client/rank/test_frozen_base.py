"""Two clusters that train adapters on one base have one digest of it, however it is held; on two bases, two."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.model_checks import UNKNOWN, digest_frozen


def adapted(seed: int = 0) -> nn.Sequential:
    """A frozen base, and one trained layer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    for layer in model[:2]:
        layer.requires_grad_(False)
    return model


def digest(model: nn.Module, collectives: Any = None) -> str:
    return digest_frozen([model], collectives or JobCollectives())


def test_one_base_has_one_digest() -> None:
    """Wrapped, and in bf16, as it is often loaded; whatever is trained."""
    model, other = adapted(), adapted()
    nn.init.zeros_(other[2].weight)
    assert digest(model) == digest(other) == digest(torch.compile(other, backend="eager")) != UNKNOWN
    other[:2].to(torch.bfloat16)
    assert digest(other) == digest(model)


def test_a_base_that_is_sharded_has_the_same() -> None:
    """The mesh's first rank has the first elements."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert digest(fully_shard(adapted(), mesh=init_device_mesh("cpu", (1,)))) == digest(adapted())
    finally:
        dist.destroy_process_group()


def test_another_base_has_another() -> None:
    model = adapted()
    assert digest(adapted(1)) != digest(model)
    model[1].weight.view(-1)[0].add_(0.5)
    assert digest(model) != digest(adapted())


def test_what_cannot_be_compared_is_unknown() -> None:
    """No frozen parameters, quantized ones, or ranks with other ones: no digest is better than a wrong one."""
    assert digest(nn.Linear(2, 2)) == UNKNOWN
    coarse = adapted()
    coarse[0].weight = nn.Parameter(torch.ones(3, 3, dtype=torch.uint8), requires_grad=False)
    assert digest(coarse) == UNKNOWN

    class TwoStages(JobCollectives):
        def all_gather(self, message: bytes) -> list[bytes]:
            return [message, hashlib.sha256(b"other names").digest()]

    assert digest(adapted(), TwoStages()) == UNKNOWN
