"""What `overlap: full` writes: bit for bit the sum of three numbers, whatever blocks and types it is done in."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dips.client.parallel import HostMemory, LazyMemory, blocks, lay_out
from dips.client.parallel.blocks import FiniteCheck, find_not_finite, split_rows, split_together
from dips.client.parallel.devices import Device, find_device
from dips.client.parallel.host import ShardCopy, write_merged
from dips.client.rank.agent_client import JobCollectives

BF16 = torch.bfloat16


def trained(
    kind: type[HostMemory], dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, HostMemory, list[torch.Tensor]]:
    """A model that was pushed and trained on, its memory, which holds a version, and the sum that is expected."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5)).to(dtype)
    collectives = JobCollectives()
    layout = lay_out(model, collectives)
    memory = kind(layout.adapter, layout.held, layout.plan, collectives)
    memory._device.block_items = 10  # several blocks for each tensor, the last one shorter
    kept = [p.detach().float().clone() for p in model.parameters()]
    memory.gather_pieces()
    memory.keep_pushed_shard()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=dtype) / 100)
        for piece in memory.pieces:
            piece.array[:] += torch.randn(piece.length).numpy() / 100
    pulled = {(l, k): torch.from_numpy(a.copy()) for l, k, _, _, a in ((*p.range, p.array) for p in memory.pieces)}
    layers = layout.plan.manifest.layers
    by_name = {layers[l].parameters[k].name: values for (l, k), values in pulled.items()}
    expected = [
        p.detach() + (by_name[name].view(p.shape) - before)
        for (name, p), before in zip(model.named_parameters(), kept, strict=True)
    ]
    memory.scatter_pieces()
    return model, memory, expected


@pytest.mark.parametrize("beside", [False, True], ids=["subtracted in the merge", "subtracted beside training"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("kind", [HostMemory, LazyMemory])
def test_a_merge_is_the_sum(kind: type[HostMemory], dtype: torch.dtype, beside: bool) -> None:
    """θ_local + (θ_pulled − θ_pushed) in fp32, then rounded once; what is rounded away goes into the next push."""
    model, memory, expected = trained(kind, dtype)
    if beside:
        thread = threading.Thread(target=memory.subtract_in_place)
        thread.start()
        thread.join()
    assert set(memory._kept._subtracted.values()) == {beside}
    assert memory.merge_shard()
    memory.finish_install()
    for p, exact in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.detach(), exact.to(dtype))
    memory.gather_pieces()
    arrays = sorted(torch.from_numpy(piece.array).norm().item() for piece in memory.pieces)
    assert arrays == pytest.approx(sorted(exact.norm().item() for exact in expected), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_an_optimizers_copy_on_the_host_is_merged_there(dtype: torch.dtype) -> None:
    """torchao's CPUOffloadOptimizer, beside a model on an accelerator: the sum of the two ended the job."""
    device = Device(torch.device("meta"))
    device.accelerated, view = True, torch.ones(1, 5, dtype=dtype)
    check = FiniteCheck(device)
    write_merged(device, ShardCopy("w", view, torch.zeros(1, 5)), torch.full((1, 5), 2.0), None, check)
    assert view.eq(3.0).all() and check.is_finite


@pytest.mark.parametrize("kind", [HostMemory, LazyMemory])
def test_a_merge_finds_memory_that_has_moved(kind: type[HostMemory]) -> None:
    """`model.data = …` beside a push: what was kept is of the same parameters."""
    model, memory, expected = trained(kind)
    for p in model.parameters():
        p.data = p.data.clone()
    assert memory.find_replaced_parameter() == "" and memory.merge_shard()
    memory.finish_install()
    assert all(torch.equal(p, exact) for p, exact in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("kind", [HostMemory, LazyMemory])
def test_a_merge_that_is_not_finite_leaves_the_version_to_be_installed(kind: type[HostMemory]) -> None:
    """It says so, and the host memory still holds the version, bit for bit."""
    model, memory, _ = trained(kind)
    with torch.no_grad():
        next(iter(model.parameters())).view(-1)[13] = float("nan")
    versions = sorted(float(piece.array.sum()) for piece in memory.pieces)
    assert not memory.merge_shard()
    memory.install_shard()
    memory.finish_install()
    assert sorted(float(p.detach().reshape(-1).numpy().sum()) for p in model.parameters()) == pytest.approx(versions)


@pytest.mark.parametrize("names", [("w", "w"), ("embed", "output")])
def test_a_parameter_that_two_parts_share_is_merged_once(names: tuple[str, str]) -> None:
    """Chunks of one rank that are tied by one object: it had the difference twice."""
    first, last = (nn.ModuleDict({name: nn.Linear(3, 2, bias=False)}) for name in names)
    last[names[1]].weight = first[names[0]].weight
    layout = lay_out([first, last], JobCollectives())
    memory = HostMemory(layout.adapter, layout.held, layout.plan, JobCollectives())
    memory.gather_pieces()
    memory.keep_pushed_shard()
    for piece in memory.pieces:
        piece.array[:] = 3.0
    memory.scatter_pieces()
    assert memory.merge_shard()
    torch.testing.assert_close(first[names[0]].weight.detach(), torch.full((2, 3), 3.0))
    assert [p.name for layer in layout.plan.manifest.layers for p in layer.parameters] == [f"{names[0]}.weight"]


def test_a_merge_needs_a_push_that_was_kept() -> None:
    """Once for each: what was kept then is gone."""
    _, memory, _ = trained(HostMemory)
    assert memory.merge_shard() and not memory.merge_shard()


def test_layers_are_merged_one_by_one() -> None:
    """A part of them is pushed, kept, pulled and merged without the others."""
    model, memory, expected = trained(HostMemory)
    before = [p.detach().clone() for p in model.parameters()]
    assert memory.merge_shard([0])
    done = [torch.equal(p, exact) for p, exact in zip(model.parameters(), expected, strict=True)]
    left = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert any(done) and [not d for d in done] == left
    assert not memory.merge_shard(), "what was kept of the first layer is used up"
    assert memory.merge_shard(range(1, len(memory.layers)))
    assert all(torch.equal(p, exact) for p, exact in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("items", [1, 3, 10, 1000])
def test_blocks_cover_a_tensor_once(items: int) -> None:
    """Flat where all of them are contiguous, by rows where one is not; never more than was asked for."""
    plain, strided = torch.zeros(9, 7), torch.zeros(7, 9).t()
    for cut, tensors in (
        (split_together, (plain, plain.clone())),
        (split_together, (plain, strided)),
        (split_rows, (plain,)),
    ):
        for found in cut(items, *tensors):
            assert len({block.shape for block in found}) == 1 and found[0].numel() <= items
            for block in found:
                block.add_(1)
        assert all(bool((tensor == 1).all()) for tensor in tensors)
        for tensor in tensors:
            tensor.zero_()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_what_is_not_finite_is_named(value: float, dtype: torch.dtype) -> None:
    """Wherever it stands, and not what is merely large."""
    device = Device()
    device.block_items = 8
    largest = torch.full((20,), torch.finfo(dtype).max, dtype=dtype)
    wrong = largest.clone()
    wrong[17] = value
    assert find_not_finite([("a", largest), ("b", wrong), ("c", wrong)], device) == "b"
    assert find_not_finite([("a", largest), ("e", largest[:0])], device) == "" == find_not_finite([], device)
    check = FiniteCheck(device)
    check.add_tensor(largest)
    assert check.is_finite


@pytest.mark.parametrize(("found", "finite"), [((0.0, 0.0), True), ((0.0, math.nan), False), ((math.nan, 0.0), False)])
def test_blocks_on_a_device_are_waited_for_once(
    found: tuple[float, ...], finite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their extremes are added up there: 0, or NaN from the first that is not finite on."""
    probe = blocks._probe_extremes
    there = lambda block: torch.tensor(block.extremes) if isinstance(block, SimpleNamespace) else probe(block)  # noqa: E731
    monkeypatch.setattr(blocks, "_probe_extremes", there)
    check = FiniteCheck(Device())
    for extremes in found:
        block: Any = SimpleNamespace(device=torch.device("cuda", 0), extremes=extremes)
        check.add_block(block)
    assert check.is_finite is finite
    check.add_block(torch.full((2,), math.inf))
    assert not check.is_finite


def test_a_block_of_the_host_is_summed_as_fast_as_it_can_be() -> None:
    """As a dot product where it is one run of fp32; else by its norm, for which nothing is copied."""
    ones = torch.ones(3, 3)
    assert blocks.sum_squares(ones) == 9.0
    assert blocks.sum_squares(torch.ones(3, 4)[:, :3]) == blocks.sum_squares(ones.bfloat16()) == 3.0


def test_host_memory_is_exactly_what_was_asked_for() -> None:
    """Not rounded up to a power of two; nothing is asked for nothing."""
    device = find_device([torch.zeros(2)])
    assert device.allocate_host(1_000_001).untyped_storage().nbytes() == 4_000_004
    assert device.allocate_host(0).numel() == 0 and not device.accelerated
