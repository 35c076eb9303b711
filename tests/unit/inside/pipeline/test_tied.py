"""Parameters that layers share: who sends what to whom, and what a push sees of them."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dips.client.parallel.devices import merge_tied
from dips.client.parallel.tensors import TorchAdapter
from dips.client.rank.agent_client import JobCollectives
from dips.inside.pipeline.parts import PipelinePart
from dips.inside.pipeline.tied import TiedOverlap, TiedParameters, list_overlaps


def test_each_element_goes_between_those_who_hold_it() -> None:
    """Two ranks share the owner evenly, three the copy: five pairs overlap, each element in one; a rank without rows
    has no part in it.
    """
    ties = {"head": "embed"}
    extents = [{"embed": (0, 6)}, {"embed": (6, 12)}, {"head": (0, 5)}, {"head": (5, 10)}, {"head": (10, 12)}]
    found = list_overlaps(ties, [*extents, {"head": (12, 12)}])
    assert [(one.copy_rank, one.owner_rank, one.begin, one.end) for one in found] == [
        (2, 0, 0, 5), (3, 0, 5, 6), (3, 1, 6, 10), (4, 1, 10, 12)
    ]  # fmt: skip
    assert list_overlaps({"a": "embed", **ties}, [{"embed": (0, 4), "head": (0, 4)}]) == [
        TiedOverlap("head", "embed", 0, 0, 0, 4)
    ]


def test_no_optimizer_has_a_copy() -> None:
    """Neither in its groups nor in its state, which Adagrad makes before the first step and a checkpoint reads."""
    part = PipelinePart({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)}, [0, 1], 0)
    ties, alone = {"head.weight": "embed.weight"}, JobCollectives()
    tied = TiedParameters(ties, [part], alone, cast(dist.ProcessGroup, None), 0)
    optimizer = tied.leave_out_copies(torch.optim.Adagrad(part.parameters()))
    assert optimizer is not None and len(optimizer.state_dict()["state"]) == 2
    assert tied.leave_out_copies(torch.optim.Adagrad([part.head.weight])) is None


def test_a_gradient_that_no_backward_gave_is_on_the_ranks_device() -> None:
    """Also while the parameter's shard is elsewhere, as in host memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part = PipelinePart({"embed": nn.Embedding(4, 2)}, [0], 0)
        sharded = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        part.embed.weight = weight = nn.Parameter(sharded)
        tied = TiedParameters(
            {"head.weight": "embed.weight"}, [part], JobCollectives(), cast(dist.ProcessGroup, None), 0
        )
        cast(DTensor, weight)._local_tensor = torch.ones(4, 2, device="meta")
        tied.sum_gradients()
        assert cast(DTensor, weight.grad).to_local().tolist() == [[0.0, 0.0]] * 4
    finally:
        dist.destroy_process_group()


def test_what_is_frozen_later_stays_as_it_is() -> None:
    """Neither weight decay nor the moments of before move it; what is not frozen gets the copy's gradient."""
    part = PipelinePart({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)}, [0, 1], 0)
    ties, alone = {"head.weight": "embed.weight"}, JobCollectives()
    tied = TiedParameters(ties, [part], alone, cast(dist.ProcessGroup, None), 0)
    optimizer = tied.leave_out_copies(torch.optim.AdamW(part.parameters()))
    assert optimizer is not None
    for trains in (True, False):
        part.requires_grad_(trains)
        before = part.embed.weight.detach().clone()
        if trains:
            part.head.weight.grad = torch.ones(4, 2)
        tied.sum_gradients()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(part.embed.weight, before) is not trains


def test_a_copy_is_pushed_under_the_name_of_its_owner() -> None:
    """One parameter in the outer loop, read where its owner is and written to both; others keep their names."""
    first, last = PipelinePart({"embed": nn.Embedding(4, 2)}, [0], 0), PipelinePart({"head": nn.Linear(2, 4)}, [1], 0)
    last.tied_names = {"head.weight": "embed.weight"}
    adapter = TorchAdapter([first, last], staged=True)
    held = {h.name: h for h in merge_tied(adapter.held_parameters())}
    assert set(held) == {"embed.weight", "head.bias"}
    assert (len(held["embed.weight"].reads), len(held["embed.weight"].writes)) == (1, 2)
    (copy,) = (h for h in TorchAdapter([last], staged=True).held_parameters() if h.name == "embed.weight")
    assert (len(copy.reads), len(copy.writes)) == (0, 1)
    assert [name for name, _, _ in adapter.local_tensors()] == ["embed.weight", "embed.weight", "head.bias"]
    assert torch.equal(held["embed.weight"].reads[0].view.flatten(), first.embed.weight.flatten())
