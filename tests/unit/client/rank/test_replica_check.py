"""Replicas are compared within each set of ranks that holds the same, and a difference is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dips.client.parallel import HostMemory, lay_out
from dips.client.parallel.adapter import HeldParameter, pair_blocks
from dips.client.parallel.blocks import sum_bits
from dips.client.parallel.rect import box_rects
from dips.client.parallel.tensors import TorchAdapter
from dips.client.rank.model_checks import EVERY, ReplicaCheck
from dips.errors import ConfigError
from dips.protocol.grouping import Grouping
from tests.unit.client.parallel.late_device import LateDevice, Meeting, ThreadRanks, emulate_streams, run_ranks

RANKS = 4


class HalvesOfTwo(TorchAdapter):
    """As HSDP: ranks 0 and 2 hold the upper half of `halved`, 1 and 3 the lower one; all of them hold the rest."""

    rank = 0

    def held_parameters(self) -> list[HeldParameter]:
        held = super().held_parameters()
        (halved,) = [h for h in held if h.name == "halved"]
        rows, cols = halved.shape
        parts = box_rects((2 * rows, cols), (rows * (self.rank % 2), 0), (rows, cols))
        made = pair_blocks("halved", halved.writes[0].view, parts)
        return [HeldParameter("halved", (2 * rows, cols), made, made) if h is halved else h for h in held]


class Halved(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(6))
        self.halved = nn.Parameter(torch.full((3, 4), 1.0 + rank % 2))
        self.register_buffer("seen", torch.full((2,), float(rank)))


def check(rank: int, meeting: Meeting, change: Any, pushes: int, dtype: torch.dtype) -> list[str]:
    """What each push comes to on one rank of four, whose copies of it `change` alters before the last."""
    model, ranks, told = Halved(rank).to(dtype), ThreadRanks(rank, meeting), []
    laid = lay_out(model, ranks, grouping=Grouping(share_buffers=("seen",)))
    checked = ReplicaCheck(HostMemory(laid.adapter, laid.held, laid.plan, ranks), ranks, told.append)
    for number in range(pushes):
        if number == pushes - 1:
            with torch.no_grad():
                change(rank, model)
        try:
            checked.check_push()
        except ConfigError as error:
            told.append(str(error))
    return told


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Four threads; the adapter of each knows its rank by its model."""
    held = HalvesOfTwo.held_parameters

    def held_parameters(self: Any) -> list[HeldParameter]:
        self.rank = int(self._parts[0].get_buffer("seen")[0])
        return held(self)

    monkeypatch.setattr(HalvesOfTwo, "held_parameters", held_parameters)
    monkeypatch.setattr("dips.client.parallel.layout.TorchAdapter", HalvesOfTwo)

    def run_all(
        change: Any = lambda rank, model: None, pushes: int = 1, dtype: torch.dtype = torch.float32
    ) -> list[str]:
        first, *others = run_ranks(RANKS, lambda r, meeting: check(r, meeting, change, pushes, dtype))
        assert others == [first] * (RANKS - 1), "all ranks raise the same error"
        return first

    return run_all


def test_shards_and_shared_buffers_may_differ(run: Any) -> None:
    """Halves differ by what they are; a buffer by what each rank has seen since DDP handed out rank 0's."""
    assert run() == []


def test_the_set_of_ranks_that_differs_is_named(run: Any) -> None:
    """Ranks 1 and 3 hold one half together: rank 3's is other, and what the others hold is not looked at."""
    (told,) = run(lambda rank, model: model.halved[1, 2].mul_(3.0 if rank == 3 else 1.0))
    assert told.startswith(
        "ranks hold different values as replicas of halved (ranks 1 and 3: 0.45 of its norm apart). "
    )


def test_the_parameter_that_is_farthest_is_named_first(run: Any) -> None:
    """And how many there are beside it: `norm` on all ranks, the lower half on two."""

    def change(rank: int, model: Halved) -> None:
        model.halved.mul_(1 + rank // 2 * 1e-6)
        model.norm[0].add_(1.0 if rank == 2 else 0.0)

    (told,) = run(change)
    assert told.startswith("ranks hold different values as replicas of norm (ranks 0 and 2: "), told
    assert "apart) and 2 more. " in told


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, True), (torch.bfloat16, False)])
def test_what_16_bits_round_is_no_difference_of_models(
    run: Any, dtype: torch.dtype, error: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.4 % of a norm is one step of bf16: a warning there, of which training goes on, and an error in fp32."""

    def change(rank: int, model: Halved) -> None:
        model.norm[0] += 0.0078125 if rank == 1 else 0.0

    raised = []
    monkeypatch.setattr(
        "dips.client.rank.model_checks.ConfigError", lambda text: raised.append(text) or ConfigError(text)
    )
    assert run(change, dtype=dtype)[0].startswith(
        "ranks hold different values as replicas of norm (ranks 0 and 1: 0.0032"
    )
    assert bool(raised) is error


@pytest.mark.parametrize(("pushes", "seen"), [(1, True), (EVERY, False), (EVERY + 1, True)])
def test_the_first_push_is_looked_at_and_then_each_sixteenth(run: Any, pushes: int, seen: bool) -> None:
    """Each time the replicas are read once more."""
    assert bool(run(lambda rank, model: model.norm.add_(rank), pushes=pushes)) is seen


def test_a_checksum_takes_a_block_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 and in int64, whatever the parameter; and it is that of the whole."""
    emulate_streams(monkeypatch)
    model = nn.Linear(8, 10, bias=False).bfloat16()
    expected = int(model.weight.detach().float().view(torch.int32).sum(dtype=torch.int64))
    device = LateDevice()
    sizes: list[int] = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and not func.is_view:
                sizes.append(made.nbytes)
            return made

    with Counted():
        found = sum_bits([(1, model.weight)], device)
    assert found == expected
    assert sum(sorted(sizes)[-2:]) <= 4 * device.block_items
