"""The account of a device's memory, and what waits in host memory: bytes, values, and who may refer to them."""

from __future__ import annotations

import copy
import time
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dips.client.parallel.devices import Device
from dips.errors import ConfigError
from dips.inside.pipeline.memory import EmulatedDevice, HostCategory, MemoryAccount, OutOfDeviceMemory, SavedBytes
from dips.inside.pipeline.offload import (
    CopyEngine,
    OffloadedActivations,
    OffloadedShards,
    PendingCopy,
    RankDevice,
    follow_parameters,
)
from dips.inside.pipeline.orders import DeviceWork, IdleCause, PipelinePlan, RankAction
from dips.inside.pipeline.pipeline import _engine_of
from dips.inside.planning.profile import GB, GBIT_BYTES
from dips.inside.planning.schedules import Engine, Op
from dips.inside.planning.simulate import MemoryCategory

CPU = torch.device("cpu")


# ---- account ---------------------------------------------------------------------------------------------------------


def test_an_account_knows_the_most_of_each_category_and_of_all() -> None:
    """What an owner holds is entered anew, not added; host memory is no memory of the device."""
    account = MemoryAccount("a.0")
    account.hold(MemoryCategory.GRADIENTS, 0, 70)
    account.hold(MemoryCategory.GRADIENTS, 0, 50)
    account.hold(MemoryCategory.ACTIVATIONS, (0, 1), 30)
    account.hold(HostCategory.BORDERS, 0, 1000)
    assert (account.held[MemoryCategory.GRADIENTS], account.peaks[MemoryCategory.GRADIENTS]) == (50, 70)
    assert account.peak_bytes == 80 and account.peaks[HostCategory.BORDERS] == 1000
    account.drop(HostCategory.BORDERS)
    account.hold(MemoryCategory.GRADIENTS, 0, 0)
    account.begin_step()
    assert account.peaks[HostCategory.BORDERS] == account.peaks[MemoryCategory.GRADIENTS] == 0
    assert account.peak_bytes == account.peaks[MemoryCategory.ACTIVATIONS] == 30


def test_a_device_that_is_full_says_what_wanted_how_much() -> None:
    """Device, category, bytes wanted and left; what fits exactly fits."""
    account = MemoryAccount("a.0", limit_bytes=100)
    account.hold(MemoryCategory.PARAMETERS, 0, 60)
    account.hold(MemoryCategory.OPTIMIZER, 0, 40)
    account.hold(MemoryCategory.OPTIMIZER, 0, 20)
    with pytest.raises(OutOfDeviceMemory, match=r"a\.0: out of memory: activations want 21 bytes, 20 of 100 are left"):
        account.hold(MemoryCategory.ACTIVATIONS, (0, 0), 21)


def test_storages_that_tensors_share_are_counted_once() -> None:
    """With recompute a layer keeps its input, without it what its backward needs; parameters are counted elsewhere."""
    found = {}
    for recompute in (False, True):
        layer: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        call = partial(checkpoint, layer, use_reentrant=False) if recompute else layer
        counted, x = SavedBytes(layer.parameters()), torch.ones(2, 4, requires_grad=True)
        with counted.counting():
            kept = call(x)
        found[recompute] = counted.nbytes
        counted.add(x.view(8))
        assert counted.nbytes == found[recompute], "a view of what is counted"
        kept.sum().backward()
    assert found == {False: 2 * 32, True: 32}


def test_an_emulated_device_is_one_that_there_can_be() -> None:
    """Rates as profile.yaml has them."""
    device = EmulatedDevice(speed=0.5, memory_gb=2, copy_gbit=8)
    assert (device.memory_bytes, device.copy_byte_s) == (2 * GB, 1 / (8 * GBIT_BYTES))
    assert EmulatedDevice().copy_byte_s == 0.0
    for wrong in ({"speed": 0}, {"speed": 2}, {"memory_gb": 0}, {"copy_gbit": 0}):
        with pytest.raises(ConfigError, match="emulate: expected a speed above 0, up to 1"):
            EmulatedDevice(**wrong).check()


def test_a_slower_device_sleeps_the_rest() -> None:
    """Of a quarter of the speed it takes four times as long; the own device takes no longer."""
    for speed, least_s in ((0.25, 0.08), (1.0, 0.02)):
        began_s = time.monotonic()
        with EmulatedDevice(speed=speed).stretched(Device()):
            time.sleep(0.02)
        took_s = time.monotonic() - began_s
        assert least_s <= took_s, took_s
    assert took_s < 0.08


# ---- activations -----------------------------------------------------------------------------------------------------


class QueuedCopies(CopyEngine):
    """Copies as an accelerator has them: `wait` orders what comes later, and none is over before `synchronize`."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._over, self.waits = False, 0

    def wait(self, copy: PendingCopy) -> None:
        self.waits += 1

    def is_done(self, copy: PendingCopy) -> bool:
        return self._over

    def synchronize(self) -> None:
        self._over = True


def test_offloaded_activations_have_no_memory_until_they_are_back() -> None:
    """A graph and other tensors may refer to them all the while: the backward finds the same bits, no version of a
    tensor has changed, and their host memory is used again.
    """
    told: list[tuple[int, int]] = []
    engine = CopyEngine(CPU)
    kept = OffloadedActivations(engine, lambda key, away, in_host: told.append((away, in_host)))
    layer = nn.Linear(4, 4)
    wanted = torch.ones(2, 4, requires_grad=True)
    layer(torch.tanh(wanted)).sum().backward()
    for number in range(2):
        x = torch.ones(2, 4, requires_grad=True)
        hidden = torch.tanh(x)
        y = layer(hidden)
        kept.keep((0, number), [hidden, hidden.view(8)])
        kept.offload((0, number))
        kept.free_copied()
        assert hidden.untyped_storage().nbytes() == 0 and told == [(0, 32), (32, 32)]
        kept.fetch((0, number))
        kept.arrive((0, number))
        kept.fetch((0, number))
        y.sum().backward()
        assert x.grad is not None and wanted.grad is not None and torch.equal(x.grad, wanted.grad)
        assert torch.equal(hidden, torch.tanh(x))
        kept.drop((0, number))
        assert told.pop() == (0, 32)
        told.clear()
    assert sum(map(len, engine._unused.values())) == 1


def test_host_memory_is_that_of_one_shape() -> None:
    """Batches of many lengths took host memory for each length, pinned and never given back."""
    plan = PipelinePlan("m", 1, (("a.0",),), ((0, 1),), False, False, {}, {}, offload=True)
    device = RankDevice(plan, "a.0", CPU, EmulatedDevice(), {}, {})
    for before, length in pairwise((3, 3, 5, 5, 4)):
        device.begin_step((torch.ones(length),), True, length)
        assert list(device._saved) == ([0] if length == before == 5 else []), "activations of another shape are others"
        device._saved[0] = 0
        device._activations.keep((0, 0), [torch.ones(length)])
        device.prepare(RankAction(Op.OFFLOAD, 0, 0))
        device._activations.drop((0, 0))
        assert [memory.nbytes for of in device._engine._unused.values() for memory in of] == [4 * length]
        device.account.hold(HostCategory.BORDERS, 0, 9)
        device.end_step()
        assert device.account.held[HostCategory.BORDERS] == 0 and not device._given, "nothing is on its way any more"


def test_a_host_that_is_ahead_frees_what_left_before() -> None:
    """When the next copy begins, the one before is over in the plan, if not as far as the host knows: one is leaving at
    most. What is fetched again before that is freed and brought back, and waited for.
    """
    told: list[tuple[int, int]] = []
    engine, held = QueuedCopies(), [torch.full((2,), float(number)) for number in range(3)]
    kept = OffloadedActivations(engine, lambda key, away, in_host: told.append((key[1], away)))
    for number, x in enumerate(held):
        kept.keep((0, number), [x])
    for number in range(3):
        kept.offload((0, number))
        kept.free_copied()
        assert [x.untyped_storage().nbytes() for x in held] == [8 * (other >= number) for other in range(3)]
    assert told == [(0, 0), (0, 8), (1, 0), (1, 8), (2, 0)]
    for number in (2, 1, 0):
        kept.arrive((0, number))
        kept.arrive((0, number))
    assert [x.tolist() for x in held] == [[number] * 2 for number in range(3)]
    assert engine.waits == 3 + 6, "for each that was freed, and each time that it is asked for"


def test_what_was_not_fetched_is_fetched_for_the_backward() -> None:
    """An order without its FETCH is slow, not wrong; what was never kept is waited for by nobody."""
    kept = OffloadedActivations(CopyEngine(CPU), lambda *_: None)
    x = torch.ones(3)
    kept.keep((0, 0), [x])
    kept.offload((0, 0))
    kept.free_copied()
    kept.arrive((0, 0))
    kept.arrive((1, 0))
    kept.keep((0, 1), [x])
    kept.arrive((0, 1))  # never offloaded
    assert torch.equal(x, torch.ones(3))


def test_an_emulated_engine_copies_one_after_another() -> None:
    """Two copies of a hundredth of a second, and one the other way meanwhile: whoever waits does so until then."""
    engine = CopyEngine(CPU, byte_s=0.01 / 400)
    first, second, back = (
        engine.begin(op, [(torch.empty(100), torch.ones(100))]) for op in (Op.OFFLOAD, Op.OFFLOAD, Op.FETCH)
    )
    assert second.ready_s == pytest.approx(first.ready_s + 0.01) and back.ready_s < second.ready_s
    assert not engine.is_done(second)
    engine.wait(second)
    assert engine.is_done(first) and engine.is_done(second)


# ---- shards ----------------------------------------------------------------------------------------------------------


def test_shards_are_on_the_device_while_they_are_fetched() -> None:
    """Three parts that train in turn are those that always were there; the account has two categories of one part; what
    is written between two steps, as by a pull, counts.
    """
    torch.manual_seed(0)
    parts: dict[int, nn.Module] = {number: nn.Linear(4, 4) for number in range(3)}
    alone = copy.deepcopy(parts)
    account = MemoryAccount("a.0")
    optimizers = {number: torch.optim.AdamW(part.parameters(), lr=0.1) for number, part in parts.items()}
    others = {number: torch.optim.AdamW(part.parameters(), lr=0.1) for number, part in alone.items()}
    shards = OffloadedShards(CopyEngine(CPU), CPU, parts, optimizers, account)
    graphs: list[torch.Tensor] = []
    places = {name: p.data_ptr() for name, p in parts[1].named_parameters()}
    assert account.held[MemoryCategory.PARAMETERS] == 0 and account.held[HostCategory.OFFLOADED] == 3 * 80
    assert MemoryCategory.WORKSPACE not in account.held, "what nobody counts is not told as 0"
    for step in range(3):
        account.begin_step()
        for number in range(3):
            shards.fetch(number)
            shards.arrive(number)
            assert account.held[MemoryCategory.PARAMETERS] == 80
            graphs.append(parts[number].weight.t())  # as a graph refers to it
            shards.offload(number, stepped=False)
            assert graphs[-1].untyped_storage().nbytes() == 0
        for number, part in parts.items():
            shards.arrive(number)
            assert torch.equal(graphs.pop(0), part.weight.t())
            for one, optimizer in ((part, optimizers[number]), (alone[number], others[number])):
                one(torch.full((2, 4), float(step))).square().sum().backward()
                if one is part:
                    shards.arrive(number, MemoryCategory.OPTIMIZER)
                optimizer.step()
                optimizer.zero_grad()
            shards.offload(number)
        shards.finish()
        assert account.held[MemoryCategory.PARAMETERS] == account.held[MemoryCategory.OPTIMIZER] == 0
        assert account.peaks[MemoryCategory.PARAMETERS] == 80
        assert account.peaks[MemoryCategory.OPTIMIZER] == (160 if step else 0), "it comes with the first step"
        with torch.no_grad():
            for held in (*parts[1].parameters(), *alone[1].parameters()):
                held.mul_(0.5)
            for held in (*parts[2].parameters(), *alone[2].parameters()) if step == 1 else ():
                held.data = torch.full_like(held, 0.25)  # as a checkpoint that is assigned: another tensor
    assert places == {name: p.data_ptr() for name, p in parts[1].named_parameters()}, "one place between steps"
    for number in parts:
        for got, wanted in zip(parts[number].parameters(), alone[number].parameters(), strict=True):
            assert torch.equal(got, wanted)


def test_shards_that_come_back_while_they_leave_keep_their_memory() -> None:
    """A copy of which the host does not know yet that it is over frees nothing that was fetched again since."""
    part = nn.Linear(4, 4)
    wanted, account = copy.deepcopy(part), MemoryAccount("a.0")
    optimizer = torch.optim.AdamW(part.parameters())
    shards = OffloadedShards(QueuedCopies(), CPU, {0: part}, {0: optimizer}, account)
    for _ in range(2):
        shards._engine._over = False  # type: ignore[attr-defined]
        shards.arrive(0)
        view = part.weight.t()
        shards.offload(0)
        shards.arrive(0)
        shards._engine.synchronize()
        shards.advance()
        assert torch.equal(view, wanted.weight.t()) and torch.equal(part.weight, wanted.weight)
        assert account.held[MemoryCategory.PARAMETERS] == 80
        shards.offload(0)
        shards._engine._over = False  # type: ignore[attr-defined]
        shards.finish()
        assert account.held[MemoryCategory.PARAMETERS] == 0
        assert shards._engine._over, "between two steps nothing is under way"  # type: ignore[attr-defined]


def test_a_count_of_steps_is_where_a_fused_optimizer_wants_it() -> None:
    """A checkpoint that is loaded while parameters are in host memory puts it there; a plain one's stays."""
    for fused, where in ((True, "meta"), (False, "cpu")):
        parameter = nn.Parameter(torch.ones(2, device="meta"))
        optimizer = torch.optim.AdamW([parameter])
        optimizer.param_groups[0]["fused"] = fused
        optimizer.state[parameter]["step"] = torch.ones(())
        follow_parameters(optimizer)
        assert optimizer.state[parameter]["step"].device.type == where


def test_a_ranks_time_is_drawn_where_the_plan_draws_it() -> None:
    """Copies on the engine for copies, computations on that of the device, and all other waits on the network."""
    engines = {kind: _engine_of(kind) for kind in (*DeviceWork, *IdleCause)}
    assert engines.pop(IdleCause.COPY) is Engine.COPY
    assert {kind for kind, engine in engines.items() if engine is Engine.COMPUTE} == {*DeviceWork}
    assert Engine.COPY not in engines.values()
