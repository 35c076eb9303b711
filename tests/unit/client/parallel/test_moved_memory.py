"""A model whose tensors move after it was laid out, and optimizers that keep fp32 masters: found anew, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dips.client.parallel import HostMemory, LazyMemory, UntouchedMemory, host, lay_out
from dips.client.parallel.adapter import HeldParameter, TensorBlock, check_devices, is_dtensor
from dips.client.parallel.devices import Device
from dips.client.parallel.rect import Rect
from dips.client.parallel.tensors import OptimizerMasters
from dips.client.rank.agent_client import JobCollectives
from dips.errors import ConfigError

BF16 = torch.bfloat16


def memory_of(model: Any, optimizer: Any = None, kind: type[HostMemory] = HostMemory) -> HostMemory:
    layout = lay_out(model, JobCollectives(), optimizer)
    return kind(layout.adapter, layout.held, layout.plan, JobCollectives())


def pull(memory: HostMemory, value: float) -> None:
    assert memory.find_replaced_parameter() == ""
    for piece in memory.pieces:
        piece.array[:] = value
    memory.scatter_pieces()
    memory.install_shard()
    memory.finish_install()


def pushed(memory: HostMemory) -> set[float]:
    """What travels."""
    assert memory.find_replaced_parameter() == ""
    memory.gather_pieces()
    return {float(x) for piece in memory.pieces for x in piece.array}


def reassign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("kind", [HostMemory, LazyMemory, UntouchedMemory])
@pytest.mark.parametrize("move", [lambda model: model.bfloat16(), lambda model: model.to(BF16).float(), reassign])
def test_memory_that_was_moved_is_found_anew(kind: type[HostMemory], move: Callable[[nn.Module], Any]) -> None:
    """The same parameters elsewhere: a pull reaches what is trained, and that is what is pushed."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    memory = memory_of(model, kind=kind)
    move(model)
    pull(memory, 5.0)
    assert all(bool((p == 5.0).all()) for p in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    assert pushed(memory) == {7.0}


def test_a_model_that_moves_to_a_device_is_merged_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By model.to("cuda") after the loop was made: each merge added a tensor of the host to one of the device, and the
    job ended.
    """
    model, device = nn.Linear(3, 2), Device(torch.device("cpu", 0))
    memory = memory_of(model)
    former = memory._device
    reassign(model)
    assert memory.find_replaced_parameter() == "" and memory._device is former
    monkeypatch.setattr(host, "find_device", lambda views: device)
    reassign(model)
    assert memory.find_replaced_parameter() == "" and memory._device is device


def swap_module(model: nn.Module) -> None:
    model[1] = nn.Linear(2, 2)


def assign_state(model: nn.Module) -> None:
    model.load_state_dict({name: torch.zeros_like(t) for name, t in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(("replace", "name"), [(swap_module, "1.bias"), (assign_state, "0.bias")])
def test_parameters_that_are_others_are_refused(replace: Callable[[nn.Module], None], name: str) -> None:
    """Nobody knows which of the two an optimizer trains."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    memory = memory_of(model)
    replace(model)
    assert memory.find_replaced_parameter() == name


# ---- fp32 masters ----------------------------------------------------------------------------------------------------


class MasterAdam(torch.optim.Optimizer):
    """As Transformer Engine's FusedAdam and its kin: an fp32 master in the state, made at the first step."""

    def __init__(self, params: Any, place: str) -> None:
        super().__init__(params, {"lr": 1e-3})
        self._place = place
        self.param_groups_master: list[dict[str, Any]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if self._place not in self.state[p]:
                    self.state[p][self._place] = p.detach().float().clone()
                master = self.state[p][self._place]
                master -= 1e-3
                p.copy_(master)


class GroupedAdam(MasterAdam):
    """As apex's FusedAdam(master_weights=True): masters beside the groups."""

    def __init__(self, params: Any, place: str) -> None:
        super().__init__(params, place)
        self.param_groups_master = [
            {"params": [p.detach().float().clone() for p in g["params"]]} for g in self.param_groups
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=True):
            for p, master in zip(group["params"], masters["params"], strict=True):
                master -= 1e-3
                p.copy_(master)


class CopyAdam:
    """A loop by hand: an optimizer over fp32 copies, which are copied back after each step."""

    def __init__(self, params: Any, place: str) -> None:
        self._params = list(params)
        self.copies = [p.detach().float().clone() for p in self._params]
        self.optimizer = torch.optim.SGD(self.copies, lr=1e-3)

    @torch.no_grad()
    def step(self) -> None:
        for copy, p in zip(self.copies, self._params, strict=True):
            copy -= 1e-3
            p.copy_(copy)


class HostAdam(torch.optim.Optimizer):
    """As torchao's CPUOffloadOptimizer: it steps copies on the host, of the parameters' type, and has no state."""

    def __init__(self, params: Any) -> None:
        self.param_d2h_map = {p: p.detach().clone() for p in params}

    @property
    def param_groups(self) -> Any:
        return [{"params": [copy]} for copy in self.param_d2h_map.values()]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, copy in self.param_d2h_map.items():
            copy -= 0.125
            p.copy_(copy)


MASTERS = [(MasterAdam, "master_param"), (MasterAdam, "main_param"), (GroupedAdam, ""), (CopyAdam, "")]


@pytest.mark.parametrize(("make", "place"), MASTERS)
def test_masters_are_pushed_and_pulled_exactly(make: Callable[..., Any], place: str) -> None:
    """1.001 is no number of bf16: a push carries the master's, and a step after a pull goes on from there."""
    model = nn.Linear(3, 2, dtype=BF16)
    optimizer = make(model.parameters(), place)
    memory = memory_of(model, optimizer)
    optimizer.step()  # masters may be made here
    pull(memory, 1.001)
    assert pushed(memory) == {float(torch.tensor(1.001))}
    pull(memory, 1.001)
    optimizer.step()
    (value,) = pushed(memory)
    assert value == pytest.approx(1.0, abs=1e-6)


def test_parameters_of_32_bits_have_masters_only_on_the_host() -> None:
    """Whatever an optimizer keeps beside them; torchao's steps copies there, by a map of its own."""
    model = nn.Linear(3, 2)
    optimizer, copy = MasterAdam(model.parameters(), "master_param"), torch.zeros(2, 3)
    optimizer.step()
    parameters = list(model.parameters())
    assert OptimizerMasters(optimizer).find_masters(parameters) == {}
    optimizer.param_d2h_map = {model.weight: copy}  # type: ignore[attr-defined]
    assert OptimizerMasters(optimizer).find_masters(parameters) == {model.weight: copy}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_copies_on_the_host_are_pulled_and_merged(dtype: torch.dtype) -> None:
    """They were not found, for an optimizer without a state; of 16 bits they would lose what others trained since."""
    model = nn.Linear(3, 2, dtype=dtype)
    optimizer = HostAdam(model.parameters())
    memory = memory_of(model, optimizer)
    first, second = (float(torch.tensor(x)) for x in (0.623456789, 0.845678912))
    pull(memory, first)
    assert pushed(memory) == {first}
    optimizer.step()
    assert list(pushed(memory)) == [pytest.approx(first - 0.125, abs=1e-7)]
    merge(memory, second)
    assert list(pushed(memory)) == [pytest.approx(second, abs=1e-7)]
    optimizer.step()
    assert list(pushed(memory)) == [pytest.approx(second - 0.125, abs=1e-7)]
    with pytest.raises(ConfigError, match="does not write an optimizer's fp32 masters: use install: whole"):
        memory_of(model, optimizer, LazyMemory)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float16])
def test_masters_of_another_type_are_refused(dtype: torch.dtype) -> None:
    """Transformer Engine keeps the 16 bits that a parameter lacks, or scaled numbers: they were pushed as weights."""
    model = nn.Linear(3, 2, dtype=BF16)
    optimizer = MasterAdam(model.parameters(), "master_param")
    optimizer.state[model.weight]["master_param"] = torch.ones(2, 3, dtype=dtype)
    with pytest.raises(ConfigError, match=rf"MasterAdam keeps its masters as {dtype}: expected torch\.float32"):
        lay_out(model, JobCollectives(), optimizer)
    optimizer.state[model.weight]["master_param"] = model.weight.detach().clone()  # as load_state_dict casts them
    memory, value = memory_of(model, optimizer), float(torch.tensor(0.123456789))
    pull(memory, value)
    assert pushed(memory) == {value}


def test_masters_that_are_made_after_the_first_pull_lose_nothing() -> None:
    """They begin as what 16 bits left of θ: the first push adds what was rounded away, those after it do not."""
    model = nn.Linear(3, 2, dtype=BF16)
    optimizer = MasterAdam(model.parameters(), "master_param")
    memory = memory_of(model, optimizer)
    for value in (0.123456789, 0.345678912):
        pull(memory, value)
        optimizer.step()
        (found,) = pushed(memory)
        assert found == pytest.approx(value - 1e-3, abs=1e-7)


def merge(memory: HostMemory, value: float) -> None:
    """Push, and merge a version of this value with nothing trained meanwhile."""
    assert memory.find_replaced_parameter() == ""
    memory.gather_pieces()
    memory.keep_pushed_shard()
    for piece in memory.pieces:
        piece.array[:] = value
    memory.scatter_pieces()
    assert memory.merge_shard()


def test_masters_that_are_made_before_a_merge_are_exact() -> None:
    """What the pull before them rounded away is in no master, and none of the next push."""
    model = nn.Linear(3, 2, dtype=BF16)
    optimizer = MasterAdam(model.parameters(), "master_param")
    memory = memory_of(model, optimizer)
    pull(memory, 0.123456789)
    optimizer.step()
    merge(memory, 0.345678912)
    (found,) = pushed(memory)
    assert found == pytest.approx(0.345678912, abs=1e-7)


@pytest.mark.parametrize("norm", [True, False], ids=["some without a master", "all with one"])
def test_masters_that_moved_after_a_push_was_kept_are_merged_as_they_were(norm: bool) -> None:
    """As when an optimizer's state is loaded, or dropped and made again: what was kept of a master and of its parameter
    changed places, and the job ended for other shapes, or merged what 16 bits had rounded.
    """
    layers = [nn.Linear(3, 2, dtype=BF16), nn.LayerNorm(2)] if norm else [nn.Linear(3, 2, dtype=BF16)]
    model = nn.Sequential(*layers)
    optimizer = MasterAdam(model[0].parameters(), "master_param")
    optimizer.step()
    memory = memory_of(model, optimizer)
    pull(memory, 1.001)
    memory.gather_pieces()
    memory.keep_pushed_shard()
    for p in model[0].parameters():
        optimizer.state[p]["master_param"] = optimizer.state[p]["master_param"].clone()
    assert memory.find_replaced_parameter() == ""
    for piece in memory.pieces:
        piece.array[:] = 1.003
    memory.scatter_pieces()
    assert memory.merge_shard()
    (found,) = pushed(memory)
    assert found == pytest.approx(1.003, abs=1e-6)


def test_masters_of_a_tied_parameter_are_merged_once() -> None:
    """Two stages of one rank, as the first and the last of a pipeline: each master had the difference twice."""
    parts = [nn.Linear(3, 2, bias=False, dtype=BF16) for _ in range(2)]
    for part in parts:
        nn.init.ones_(part.weight)
    optimizer = MasterAdam([part.weight for part in parts], "master_param")
    optimizer.step()
    memory = memory_of(parts, optimizer)
    pull(memory, 1.001)
    merge(memory, 1.003)
    for part in parts:
        assert optimizer.state[part.weight]["master_param"].unique().tolist() == pytest.approx([1.003], abs=1e-6)


def test_a_function_makes_masters_after_every_install() -> None:
    """For an optimizer of any other kind; after a merge as well. Masters that are known are merged, and not made."""
    model, called = nn.Linear(3, 2, dtype=BF16), []
    memory = memory_of(model, lambda: called.append(float(model.bias.detach()[0])))
    pull(memory, 2.0)
    merge(memory, 3.0)
    assert called == [2.0, 3.0]
    mixed: Any = nn.Sequential(nn.Linear(3, 2, dtype=BF16), nn.Linear(2, 2))
    optimizer = MasterAdam(mixed[0].parameters(), "master_param")
    optimizer.step()
    known = memory_of(mixed, optimizer)
    known._adapter.reload_masters = lambda: called.append(0.0)  # type: ignore[method-assign]
    merge(known, 3.0)
    assert called == [2.0, 3.0]


@pytest.mark.parametrize("step", [pull, merge])
def test_an_install_that_breaks_off_leaves_a_torn_model(step: Callable[[HostMemory, float], None]) -> None:
    """As where a script goes on after a device that was full: a half-written model was trained, and merged twice."""

    def break_off() -> None:
        raise MemoryError("of the device")

    memory = memory_of(nn.Linear(3, 2, dtype=BF16), break_off)
    with pytest.raises(MemoryError):
        step(memory, 2.0)
    assert memory.torn
    memory._adapter.reload_masters = lambda: None  # type: ignore[method-assign]
    step(memory, 2.0)
    assert not memory.torn


@pytest.mark.parametrize(("make", "place"), MASTERS)
def test_what_is_frozen_later_is_shared_as_before(make: Callable[..., Any], place: str) -> None:
    """With masters that are there already, are made afterwards, or are matched by their order: both parts travel."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(BF16)
    optimizer = make(model.parameters(), place)
    memory = memory_of(model, optimizer)
    model[0].requires_grad_(False)
    pull(memory, 2.0)
    optimizer.step()
    (value,) = pushed(memory)
    assert value == pytest.approx(2.0 - 1e-3, abs=1e-6)
    assert sum(piece.length for piece in memory.pieces) == sum(p.numel() for p in model.parameters())


def test_an_optimizer_of_other_tensors_is_refused() -> None:
    """Flat partitions, as DeepSpeed's: a function is the way out. What is no optimizer is named."""
    model = nn.Linear(3, 2, dtype=BF16)
    flat = SimpleNamespace(optimizer=torch.optim.SGD([torch.zeros(8)], lr=0.1))
    with pytest.raises(ConfigError, match=r"1 tensors that are neither the model's 2 parameters.*optimizer=function"):
        lay_out(model, JobCollectives(), flat)
    with pytest.raises(ConfigError, match="expected a torch optimizer, one that wraps it, or a function"):
        lay_out(model, JobCollectives(), 3)


# ---- 16 bits without masters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HostMemory, LazyMemory, UntouchedMemory])
def test_a_model_of_16_bits_that_trains_nothing_pushes_what_it_pulled(kind: type[HostMemory]) -> None:
    """Bit for bit, whatever rounding took; and what it trains is added to that."""
    model = nn.Linear(3, 2, dtype=BF16)
    memory = memory_of(model, kind=kind)
    value = float(torch.tensor(0.123456789))
    pull(memory, value)
    assert pushed(memory) == {value}
    assert pushed(memory) == {value}, "as often as it is asked"
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.125)
    (trained,) = pushed(memory)
    assert trained == pytest.approx(value + 0.125, abs=2**-10) and trained != value
    rounded = memory.remainders.take_state()
    assert rounded is not None and rounded.numel() == 8
    coarse = {float(model.bias.detach()[0])}
    assert memory.remainders.restore_state(torch.zeros(8)) and pushed(memory) == coarse
    assert memory.remainders.restore_state(rounded) and pushed(memory) == {trained}, "a checkpoint brings them back"
    assert not memory.remainders.restore_state(rounded[1:])
    assert memory.remainders.restore_state(rounded) and memory.remainders.restore_state(None)
    assert pushed(memory) == coarse, "an older checkpoint has none"


def test_what_rounding_took_is_not_of_a_scripts_default_type() -> None:
    """Under torch.set_default_dtype(torch.bfloat16) it was itself rounded: who trains nothing pushed a change."""
    memory = memory_of(nn.Linear(3, 2, dtype=BF16))
    value = float(torch.tensor(0.123456789))
    torch.set_default_dtype(BF16)
    try:
        pull(memory, value)
        assert pushed(memory) == {value}
    finally:
        torch.set_default_dtype(torch.float32)


def test_each_block_that_is_itself_pushed_rounds() -> None:
    """A gated matrix lies in two blocks on each rank; one whose masters are pushed loses nothing."""
    coarse, exact = (
        tuple(TensorBlock(Rect.flat_run(3 * at, 3), torch.zeros(1, 3, dtype=dtype)) for at in range(2))
        for dtype in (BF16, torch.float32)
    )
    for reads, rounds in ((coarse, True), (exact, False)):
        held = HeldParameter("w", (2, 3), reads, coarse)
        assert [host._rounds(held, block) for block in coarse] == [rounds] * 2
    assert not host._rounds(HeldParameter("w", (2, 3), exact, exact), exact[0])


def test_a_merge_keeps_the_remainder() -> None:
    """θ_local ← θ_pulled + (θ_local − θ_pushed) in fp32: trained nothing, it is what was pulled."""
    model = nn.Linear(3, 2, dtype=BF16)
    memory = memory_of(model)
    first, second = (float(torch.tensor(x)) for x in (0.123456789, 0.345678912))
    pull(memory, first)
    merge(memory, second)
    (pushed_now,) = pushed(memory)
    assert pushed_now == pytest.approx(second, abs=1e-7)


def test_what_others_train_arrives_beside_a_model_of_16_bits() -> None:
    """Two clusters of equal weight, one trains 1e-5 a round where a unit of bf16 is 4e-3: its half arrives."""
    models = nn.Linear(3, 2), nn.Linear(3, 2, dtype=BF16)
    memories = [memory_of(model) for model in models]
    start = theta = float(torch.tensor(0.5001))
    for _ in range(20):
        for memory in memories:
            pull(memory, theta)
        with torch.no_grad():
            for p in models[0].parameters():
                p.add_(1e-5)
        (exact,), (coarse,) = (pushed(memory) for memory in memories)
        theta = float(torch.tensor((exact + coarse) / 2))
    assert (theta - start) / (20 * 1e-5 / 2) > 0.95


# ---- what cannot be copied -------------------------------------------------------------------------------------------


class Packed(torch.Tensor):
    """Stands in for a quantized tensor subclass."""


def test_what_cannot_be_copied_is_named_with_the_way_out() -> None:
    """A parameter on meta, one of a tensor subclass, one of fp8, and a model over several devices."""
    with pytest.raises(ConfigError, match=r"weight: has no memory yet.*to_empty"):
        lay_out(nn.Linear(3, 2, bias=False, device="meta"), JobCollectives())
    with pytest.raises(ConfigError, match=r"weight: has no memory yet"):
        lay_out(nn.LazyLinear(2, bias=False), JobCollectives())
    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(torch.zeros(2, 3).as_subclass(Packed))
    with pytest.raises(ConfigError, match="weight: a parameter held as Packed cannot be copied exactly"):
        lay_out(model, JobCollectives())
    model.weight = nn.Parameter(torch.zeros(2, 3).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="weight: expected a parameter of one of"):
        lay_out(model, JobCollectives())


def test_a_model_over_several_devices_is_named() -> None:
    """As `device_map="auto"` makes them: which parameter lies where, and one process for each device."""
    blocks = [(TensorBlock(Rect.flat_run(0, 6), torch.empty(1, 6, device=device)),) for device in ("cpu", "meta")]
    held = [HeldParameter(f"{n}.weight", (2, 3), block, block) for n, block in enumerate(blocks)]
    check_devices(held[:1])
    with pytest.raises(ConfigError, match=r"0\.weight on cpu, 1\.weight on meta; device_map\?.*one process for each"):
        check_devices(held)


def test_compile_around_ddp_leaves_no_trace_in_names(tmp_path: Any) -> None:
    """torch.compile(DDP(m)) is the model m."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        model = nn.Linear(3, 2)
        wrapped: Any = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
        found = lay_out(wrapped, JobCollectives())
        assert found.plan.manifest == lay_out(model, JobCollectives()).plan.manifest
        with pytest.raises(ConfigError, match="compiled graph of a OptimizedModule"):
            found.adapter.read_groups()
    finally:
        torch.distributed.destroy_process_group()


def test_a_look_at_the_model_walks_over_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 experts are looked at several times in a round, while training stands."""
    memory, walks = memory_of(nn.Linear(3, 2)), list[int]()
    walk = memory._adapter.local_tensors
    monkeypatch.setattr(memory._adapter, "local_tensors", lambda: (walks.append(1), walk())[1])
    assert memory.find_replaced_parameter() == "" and len(walks) == 1


@pytest.fixture
def one_rank() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_what_an_evaluation_left_gathered_is_no_other_parameter(one_rank: Any) -> None:
    """FSDP2 shows the gathered parameters of its root until the next backward: they are dropped before a look."""
    model = fully_shard(nn.Sequential(nn.Linear(3, 2)), mesh=one_rank)
    memory = memory_of(model)
    with torch.no_grad():
        model(torch.zeros(1, 3))
    assert not any(is_dtensor(p) for p in model.parameters()), "what tells it apart"
    assert memory.find_replaced_parameter() == ""
