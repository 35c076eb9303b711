"""Which forward reads what, who else is served, and what is refused: `install: lazy` on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dips.client.parallel import LazyMemory, adapter, lay_out, lazy
from dips.client.parallel.adapter import (
    ReadGroup,
    check_sharded,
    find_read_groups,
    fsdp_param_groups,
    groups_gathered_with,
)
from dips.client.parallel.layout import choose_adapter
from dips.client.rank.agent_client import JobCollectives
from dips.errors import ConfigError, LocalProtocolError


class LazyLayer(nn.Module):
    """Reads a weight of a module that it does not call, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.beside = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.inner(x), self.beside.weight, self.beside.bias)


class LazyModel(nn.Module):
    """Parameters of its own, a list of layers, an output that is tied to the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(4))
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([LazyLayer() for _ in range(3)])
        self.outputs = nn.ModuleDict({"words": nn.Linear(4, 7, bias=False)})
        self.outputs["words"].weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.outputs["words"](x)


class Peeping(LazyModel):
    """Reads a layer's weight without calling it or anything in it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + (self.layers[2].beside.weight ** 2).sum()


TOKENS = torch.arange(6).reshape(1, 6)


def laid(model: nn.Module) -> LazyMemory:
    collectives = JobCollectives()
    layout = lay_out(model, collectives)
    return LazyMemory(layout.adapter, layout.held, layout.plan, collectives)


def land(memory: LazyMemory, number: float) -> None:
    """A version all of whose elements are `number` lies in host memory."""
    memory.finish_install()
    for piece in memory.pieces:
        piece.array[:] = number
    memory.scatter_pieces()
    memory.install_shard()


def at(model: nn.Module, number: float) -> set[str]:
    return {name for name, p in model.named_parameters() if bool((p == number).all())}


def test_a_read_group_is_what_is_read_together() -> None:
    """The rest of the model, each layer, and what is tied in both places where it stands."""
    model = LazyModel()
    found = find_read_groups(model, {p: name for name, p in model.named_parameters()})
    layers = [
        {f"layers.{i}.{part}.{kind}" for part in ("inner", "beside") for kind in ("weight", "bias")} for i in range(3)
    ]
    assert [set(group.reads) for group in found] == [{"scale", "embed.weight"}, *layers, {"embed.weight"}]
    assert model.layers[1].beside in found[2].modules and model.embed in found[0].modules


def test_frozen_parameters_are_in_no_read_group() -> None:
    """What is not pulled is not installed."""
    model = LazyModel()
    model.layers.requires_grad_(False)
    memory = laid(model)
    land(memory, 2.0)
    model(TOKENS)
    assert at(model, 2.0) == {"scale", "embed.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_is_written_when_the_forward_comes_to_it(dtype: torch.dtype) -> None:
    """Before its first module computes, all of it, and nothing of the layers behind it."""
    model = LazyModel(dtype)
    memory = laid(model)
    seen: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: seen.update({name: at(model, 0.5)}))
    land(memory, 0.5)
    assert at(model, 0.5) == set()
    told: list[str] = []
    memory.on_installed = told.extend
    assert set(memory.pending) == set(memory._parameters)
    model(TOKENS)
    assert sorted(told) == sorted(memory._parameters) and not memory.pending
    names = {name for name, _ in model.named_parameters()}
    assert seen["embed"] == {"scale", "embed.weight"}
    assert seen["layers.0"] == seen["embed"] | {n for n in names if n.startswith("layers.0.")}
    assert seen["layers.1"] == names - {n for n in names if n.startswith("layers.2.")}
    assert seen["outputs.words"] == at(model, 0.5) == names
    seen.clear()
    memory.on_inner_step()
    assert memory._handles == [] and memory._pending == {}


class Queue:
    """A device whose copies come when somebody waits for them, in order: what a stream of its own is."""

    accelerated = True

    def __init__(self) -> None:
        self.asked: list[Callable[[], Any]] = []
        self.waits: list[tuple[int, bool]] = []
        self._done = 0

    def background_copies(self) -> Any:
        return nullcontext()

    def ordered_copies(self) -> Any:
        return nullcontext()

    def record_event(self) -> Any:
        return [len(self.asked)]

    def wait_for_event(self, event: list[int], *, all_streams: bool) -> None:
        self.waits.append((event[0], all_streams))
        self._arrive(event[0])

    def synchronize(self) -> None:
        self._arrive(len(self.asked))

    def _arrive(self, end: int) -> None:
        for copy_it in self.asked[self._done : end]:
            copy_it()
        self._done = max(self._done, end)


@torch.no_grad()
def test_a_read_group_waits_for_its_own_copies_and_for_no_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are asked for when the version has landed; each forward finds its own arrived, in the order of the calls."""
    model, queue = LazyModel(), Queue()
    memory = laid(model)
    monkeypatch.setattr(lazy, "write_pulled", lambda _, one: queue.asked.append(lambda: one.view.copy_(one.host)))
    monkeypatch.setattr(memory, "_device", queue)
    land(memory, 0.5)
    assert len(queue.asked) == 2 + 3 * 4 and at(model, 0.5) == set()
    ends: list[int] = []
    for module in (model.embed, *model.layers, model.outputs["words"]):
        module.register_forward_pre_hook(lambda *_: ends.append(len(at(model, 0.5))))
    model(TOKENS)
    assert queue.waits == [(2, False), (6, False), (10, False), (14, False)]
    assert ends == [2, 6, 10, 14, 14]
    land(memory, 0.75)
    model.layers[0](torch.zeros(1, 4))
    memory.finish_install()  # before the next transfer writes into the host memory
    assert len(at(model, 0.75)) == 14 and queue.waits[-1] == (28, True)


def test_a_module_called_by_itself_installs_all_of_its_read_group() -> None:
    """A model whose forward calls the parts of its layers, not the layers."""
    model = LazyModel()
    memory = laid(model)
    land(memory, 3.0)
    model.layers[1].inner(torch.zeros(1, 4))
    assert at(model, 3.0) == {n for n, _ in model.named_parameters() if n.startswith("layers.1.")}
    model.outputs["words"](torch.zeros(1, 4))
    assert "embed.weight" in at(model, 3.0) and "scale" not in at(model, 3.0)


@pytest.mark.parametrize(
    "reader",
    [
        lambda model, memory: model.state_dict(),
        lambda model, memory: model.layers[0].state_dict(),
        lambda model, memory: memory.gather_pieces(),
        lambda model, memory: memory.finish_install(),
    ],
)
def test_whoever_reads_otherwise_has_all_of_it(reader: Any) -> None:
    """A checkpoint, of the model or of a part; a push; who asks for it."""
    model = LazyModel()
    memory = laid(model)
    land(memory, 3.0)
    reader(model, memory)
    assert at(model, 3.0) == {name for name, _ in model.named_parameters()}
    assert not any(m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules())


def test_what_a_checkpoint_brings_is_not_written_over() -> None:
    """Loaded after a pull: what was left of the pull comes before it."""
    model = LazyModel()
    memory = laid(model)
    other = {name: torch.full_like(p, 9.0) for name, p in model.state_dict().items()}
    land(memory, 3.0)
    model.load_state_dict(other)
    model(TOKENS)
    memory.finish_install()
    assert at(model, 9.0) == {name for name, _ in model.named_parameters()}


def test_an_optimizer_finds_all_of_it() -> None:
    """What no forward came to is installed before the step; another model's optimizer is none of its business."""
    model, other = LazyModel(), nn.Linear(2, 2)
    memory = laid(model)
    land(memory, 3.0)
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert at(model, 3.0) == set()
    model.embed(TOKENS).sum().backward()
    torch.optim.SGD([*other.parameters(), *model.parameters()], lr=1.0).step()
    assert at(model, 3.0) == {name for name, _ in model.named_parameters()} - {"embed.weight"}


def test_an_optimizer_with_a_closure_has_the_forward_still_before_it() -> None:
    """LBFGS calls the model within its step: all of it is installed before."""
    model = LazyModel()
    memory = laid(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    land(memory, 3.0)
    optimizer.step(lambda: float(model(TOKENS).detach().sum()))
    assert at(model, 3.0) == {name for name, _ in model.named_parameters()}


def test_a_step_on_the_former_version_is_refused() -> None:
    """Nothing of the model was called: its gradients, or what was written by hand, are of what is replaced."""
    model = LazyModel()
    memory = laid(model)
    land(memory, 3.0)
    model.embed.forward(TOKENS).sum().backward()  # who calls this, and not the module, calls no hook
    with pytest.raises(LocalProtocolError, match=r"no module of the model was called.*use install: whole"):
        memory.on_inner_step()


def test_a_parameter_that_was_read_in_passing_is_noticed() -> None:
    """Its layer had not been called when it was read, and never is: it has a gradient of the former version."""
    model = Peeping()
    memory = laid(model)
    land(memory, 3.0)
    (model.scale * model.embed(TOKENS) + model.layers[2].beside.weight.sum()).sum().backward()
    with pytest.raises(LocalProtocolError, match=r"layers\.2\.beside\.weight: has a gradient, and no module"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_an_install_that_breaks_off_leaves_a_torn_model() -> None:
    """Two tensors of a layer, the second of which cannot be written: nobody computes with it, nobody saves it."""
    model = LazyModel()
    memory = laid(model)
    land(memory, 3.0)
    write, count = memory._write_copy, [0]

    def breaks(one: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            raise MemoryError("of the device")
        write(one)

    memory._write_copy = breaks
    with pytest.raises(MemoryError):
        model(TOKENS)
    assert memory.torn
    for reader in (
        lambda: model(TOKENS),
        model.state_dict,
        memory.gather_pieces,
        memory.finish_install,
        memory.on_inner_step,
    ):
        with pytest.raises(LocalProtocolError, match="the model is torn"):
            reader()


def test_a_torn_install_that_is_freed_ends_no_forward() -> None:
    """A script that catches a full device makes another loop: each forward raised the error of the former one."""
    model = LazyModel()
    memory = laid(model)
    land(memory, 3.0)
    memory.torn = True
    memory.free()
    model(TOKENS).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not any(m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules())


def test_a_copy_of_the_model_takes_nothing_of_it_along() -> None:
    """deepcopy while something is left: no host memory is copied, a call of the copy installs nothing anywhere."""
    model = LazyModel()
    memory = laid(model)
    land(memory, 3.0)
    reference = copy.deepcopy(model)
    reference(TOKENS)
    assert at(model, 3.0) == set() and not memory._forward_seen
    memory.finish_install()
    land(memory, 4.0)
    memory.finish_install()
    assert at(reference, 3.0) == at(reference, 4.0) == set()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.compile(LazyModel(), backend="eager"), "break the compiled graph of a OptimizedModule"),
        (lambda: [LazyModel()], "not supported for a model given in parts"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "cannot hook into a RecursiveScriptModule"),
    ],
)
def test_what_it_cannot_hook_into_is_refused(make: Any, why: str) -> None:
    """At the start, with what to write instead."""
    with pytest.raises(ConfigError, match=f"{why}.*: use install: whole"):
        laid(make())


def test_fp32_masters_of_some_parameters_are_refused() -> None:
    """One parameter in bf16 among those in fp32 is enough, for its optimizer keeps a master of it."""
    model = LazyModel()
    model.layers[1].to(torch.bfloat16)
    adapter = choose_adapter(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigError, match="does not write an optimizer's fp32 masters: use install: whole"):
        adapter.read_groups()


def test_a_module_compiled_in_place_is_refused() -> None:
    """`module.compile()` leaves the module's class as it is."""
    model = LazyModel()
    model.layers[1].compile(backend="eager")
    with pytest.raises(ConfigError, match="break the compiled graph of a LazyLayer"):
        laid(model)


def test_a_merge_that_another_rank_cannot_do_is_replaced() -> None:
    """It was begun here: the install that all ranks do instead leaves nothing of it, and no second set of hooks."""
    model = LazyModel()
    memory = laid(model)
    land(memory, 3.0)
    memory.gather_pieces()
    memory.keep_pushed_shard()
    for piece in memory.pieces:
        piece.array[:] = 9.0
    memory.scatter_pieces()
    assert memory.merge_shard()
    memory.install_shard()
    model(TOKENS)
    memory.finish_install()
    assert at(model, 9.0) == {name for name, _ in model.named_parameters()}
    assert not any(m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules())


def test_a_merge_needs_a_push_of_its_own() -> None:
    """What was kept for one is added once, as `install: whole` does."""
    model = LazyModel()
    memory = laid(model)
    memory.gather_pieces()
    memory.keep_pushed_shard()
    memory.scatter_pieces()
    assert memory.merge_shard()
    model(TOKENS)
    memory.finish_install()
    assert not memory.merge_shard() and not memory._handles


def test_what_fsdp_gathers_together_is_listed_by_any_torch() -> None:
    """A state has a list of groups in newer torch; in older torch one group, or None if no parameter is its own."""
    group, other = object(), object()
    for state, groups in (
        (SimpleNamespace(_fsdp_param_groups=[group, other], _fsdp_param_group=group), [group, other]),
        (SimpleNamespace(_fsdp_param_group=group), [group]),
        (SimpleNamespace(_fsdp_param_group=None), []),
        (SimpleNamespace(), []),
    ):
        assert fsdp_param_groups(state) == groups


class FsdpState:
    """What fully_shard keeps of a module, as far as it is read."""

    def __init__(self, **group: Any) -> None:
        self._fsdp_param_groups = [SimpleNamespace(**{"_all_gather_result": None, "is_sharded": True, **group})]
        self._states_to_forward_prefetch: list[FsdpState] = []


@pytest.mark.parametrize(
    ("state", "read"),
    [
        (None, True),
        (FsdpState(), True),
        (FsdpState(_all_gather_result=object()), False),
        (FsdpState(is_sharded=False), False),
    ],
)
def test_what_is_gathered_before_its_install_is_noticed(state: Any, read: bool) -> None:
    """A prefetch of the script's, or `unshard`: the forward would compute with the version before."""
    group = ReadGroup(reads={"w": nn.Parameter(torch.ones(1))}, state=state)
    with nullcontext() if read else pytest.raises(LocalProtocolError, match="w: gathered by FSDP before the forward"):
        check_sharded(group)


def test_a_forward_after_an_unshard_is_refused() -> None:
    """It would read what FSDP gathered of the version before."""
    model = LazyModel()
    memory = laid(model)
    land(memory, 3.0)
    memory._groups[0].state = FsdpState(is_sharded=False)
    with pytest.raises(LocalProtocolError, match="gathered by FSDP before the forward of its module"):
        model(TOKENS)


def test_a_group_is_installed_with_those_that_it_prefetches() -> None:
    """`set_modules_to_forward_prefetch`: their shards are gathered in its own pre-forward."""
    first, second = (ReadGroup(state=FsdpState()) for _ in range(2))
    first.state._states_to_forward_prefetch = [second.state, FsdpState()]
    among = {group.state: group for group in (first, second)}
    assert list(groups_gathered_with(first, among)) == [first, second]
    assert list(groups_gathered_with(plain := ReadGroup(), among)) == [plain]


@pytest.mark.parametrize("lacks", ["_states_to_forward_prefetch", "_all_gather_result", "is_sharded"])
def test_an_fsdp_without_what_is_read_here_is_refused(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of torch: named at the start, and not in the first install."""
    model, state = nn.Sequential(nn.Linear(2, 2)), FsdpState()
    monkeypatch.setattr(adapter, "is_fsdp", lambda module: isinstance(module, nn.Linear))
    monkeypatch.setattr(adapter, "_fsdp_state", lambda module: state)
    names = {p: name for name, p in model.named_parameters()}
    (group,) = find_read_groups(model, names)
    assert group.state is state and set(group.reads) == {"0.weight", "0.bias"}
    state._fsdp_param_groups += FsdpState()._fsdp_param_groups
    for holder in (state, state._fsdp_param_groups[0]):
        holder.__dict__.pop(lacks, None)
    with pytest.raises(ConfigError, match="install: lazy does not support the Linear of torch"):
        find_read_groups(model, names)


def test_an_entry_of_a_list_is_one_group_with_all_in_it() -> None:
    """Also with the lists inside: a layer reads what it likes of its own."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    groups = find_read_groups(model, {p: name for name, p in model.named_parameters()})
    assert [sorted(group.reads) for group in groups] == [
        ["0.0.bias", "0.0.weight", "0.1.bias", "0.1.weight"], ["1.bias", "1.weight"],
    ]  # fmt: skip
