"""Megatron-core's names, partitions and masters on one rank, whose place among the others Megatron is told."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dips.client.parallel.adapter import HeldParameter, TensorBlock
from dips.client.parallel.layout import choose_adapter
from dips.client.parallel.tensors import TorchAdapter
from dips.errors import ConfigError

PLACES = ("tensor_model_parallel", "expert_model_parallel", "expert_tensor_parallel")


@cache
def megatron() -> Any:
    """Import it with the first test: it takes two seconds, and every worker collects this file."""
    return pytest.importorskip(
        "dips.client.parallel.megatron", reason="megatron-core is not installed: NOT tested here"
    )


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One rank, unless a test places it elsewhere."""
    for kind in PLACES:
        place(kind, 1, 0)
    yield
    for kind in PLACES:
        place(kind, None, None)


def place(kind: str, size: int | None, rank: int | None) -> None:
    """Tell Megatron this rank's place, as its own tests do."""
    getattr(megatron().parallel_state, f"set_{kind}_world_size")(size)
    getattr(megatron().parallel_state, f"set_{kind}_rank")(rank)


class ModuleOf(nn.Module):
    """A module with these attributes: parameters, modules and what Megatron writes there."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def parameter(*shape: int, dtype: torch.dtype = torch.float32, **attributes: Any) -> nn.Parameter:
    made = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def cut(dim: int, *shape: int, stride: int = 1) -> nn.Parameter:
    return parameter(*shape, tensor_model_parallel=True, partition_dim=dim, partition_stride=stride)


def chunk(experts: nn.Module, tied: bool = False) -> nn.Module:
    """The second of two stages of two layers, with the attributes that Megatron gives its modules."""
    layers = nn.ModuleList()
    for number in (3, 4):
        mlp = ModuleOf(num_local_experts=2, router=ModuleOf(weight=parameter(2)), experts=deepcopy(experts))
        attention = ModuleOf(layer_number=number, weight=parameter(2))
        layers.append(ModuleOf(layer_number=number, self_attention=attention, mlp=mlp))
    norm, layer_list = ModuleOf(weight=parameter(2)), ModuleOf(layers=nn.ModuleList([ModuleOf(weight=parameter(2))]))
    decoder = ModuleOf(layers=layers, final_layernorm=norm)
    output = ModuleOf(weight=parameter(2))
    return ModuleOf(decoder=decoder, output_layer=output, head=layer_list, share_embeddings_and_output_weights=tied)


SEQUENTIAL = ModuleOf(
    num_local_experts=2,
    local_experts=nn.ModuleList([ModuleOf(linear_fc1=ModuleOf(weight=parameter(2))) for _ in range(2)]),
)
GROUPED = ModuleOf(num_local_experts=2, linear_fc1=ModuleOf(weight0=parameter(2), weight1=parameter(2)))


@pytest.mark.parametrize("experts", [SEQUENTIAL, GROUPED], ids=["sequential", "grouped"])
def test_names_are_those_of_the_whole_model(experts: nn.Module) -> None:
    """Layers are numbered over all stages, experts over all ranks of their group, of either kind alike."""
    place("expert_model_parallel", 4, 1)
    model = chunk(experts, tied=True)
    names = megatron().GlobalNames(model)
    of_layer = ("self_attention.weight", "mlp.router.weight", *(
        f"mlp.experts.local_experts.{expert}.linear_fc1.weight" for expert in (2, 3)
    ))  # fmt: skip
    assert {names.name_of(path) for path, _ in model.named_parameters(remove_duplicate=False)} == {
        *(f"decoder.layers.{layer}.{name}" for layer in (2, 3) for name in of_layer),
        "decoder.final_layernorm.weight", "embedding.word_embeddings.weight", "head.layers.0.weight",
    }  # fmt: skip
    assert megatron().GlobalNames(chunk(experts)).name_of("output_layer.weight") == "output_layer.weight"


def test_experts_in_one_parameter_are_refused_over_several_ranks() -> None:
    """The legacy GroupedMLP has them one after the other, which no name and no rectangle describes."""
    names = megatron().GlobalNames(chunk(ModuleOf(num_local_experts=2, weight1=parameter(2))))
    path = "decoder.layers.0.mlp.experts.weight1"
    assert names.name_of(path) == "decoder.layers.2.mlp.experts.weight1"
    place("expert_tensor_parallel", 2, 0)
    assert names.name_of("decoder.layers.0.mlp.experts.bias") == "decoder.layers.2.mlp.experts.bias"
    with pytest.raises(ConfigError, match=f"{path}: the legacy GroupedMLP"):
        names.name_of(path)


def held(model: nn.Module, optimizer: Any = None) -> dict[str, HeldParameter]:
    return {one.name: one for one in megatron().MegatronAdapter([model], optimizer).held_parameters()}


def elements(blocks: tuple[TensorBlock, ...]) -> list[tuple[int, float]]:
    """Number in the full parameter and value of each element."""
    return [
        (block.rect.first + row * block.rect.width + col, float(block.view[row, col]))
        for block in blocks
        for row in range(block.rect.rows)
        for col in range(block.rect.cols)
    ]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("kind", "prefix"), [("tensor_model_parallel", ""), ("expert_tensor_parallel", "x.experts.")])
def test_partitions_are_found_in_the_full_parameter(kind: str, prefix: str, gated: bool) -> None:
    """Rows, columns, and the two matrices of a gated fc1, each of which is cut; what is not cut is everywhere."""
    full, size = torch.arange(48.0).reshape(8, 6), 2
    halves = full.reshape(2, 4, 6)
    for rank in range(size):
        place(kind, size, rank)
        of_each = [half[2 * rank : 2 * rank + 2] for half in halves]
        expected = {
            "linear_fc1.weight": torch.cat(of_each) if gated else full[4 * rank : 4 * rank + 4],
            "linear_fc2.weight": full[:, 3 * rank : 3 * rank + 3],
            "linear_qkv.weight": torch.cat(of_each),  # Megatron's own stride
            "norm.weight": full,
        }
        made = {
            "linear_fc1": ModuleOf(weight=cut(0, 4, 6)),
            "linear_fc2": ModuleOf(weight=cut(1, 8, 3)),
            "linear_qkv": ModuleOf(weight=cut(0, 4, 6, stride=2)),
            "norm": ModuleOf(weight=parameter(8, 6)),
        }
        model = ModuleOf(x=ModuleOf(experts=ModuleOf(**made)) if prefix else ModuleOf(**made))
        model.config = SimpleNamespace(gated_linear_unit=gated)
        with torch.no_grad():
            for name, module in made.items():
                module.weight.copy_(expected[f"{name}.weight"])
        found = held(model)
        for name, part in expected.items():
            one = found[f"{prefix or 'x.'}{name}"]
            assert one.shape == (8, 6) and one.reads is one.writes
            assert sorted(elements(one.reads)) == sorted((int(value), value) for value in part.flatten().tolist()), name


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("x", cut(1, 4, 6, stride=2), r"x: a partition of dim 1 with stride 2 is not supported"),
        ("x", parameter(2, dtype=torch.float64), "x: expected a parameter of one of torch.float32"),
    ],
)
def test_what_has_no_known_place_is_refused(name: str, given: nn.Parameter, why: str) -> None:
    place("tensor_model_parallel", 2, 0)
    with pytest.raises(ConfigError, match=why):
        held(ModuleOf(**{name: given}))


def test_shared_buffers_are_held_whole() -> None:
    """The bias by which a router balances its experts, under its global name; a type that fp32 rounds is refused."""
    router = ModuleOf(weight=parameter(2))
    router.register_buffer("expert_bias", torch.ones(4))
    model = ModuleOf(router=router)
    adapter = megatron().MegatronAdapter([model], share_buffers=("*expert_bias",))
    assert [(one.name, one.shape) for one in adapter.held_parameters()] == [
        ("router.weight", (2,)), ("router.expert_bias", (4,)),
    ]  # fmt: skip
    assert [name for name, *_ in adapter.local_tensors()] == ["router.weight", "router.expert_bias"]
    router.expert_bias = router.expert_bias.double()
    with pytest.raises(ConfigError, match=r"router\.expert_bias: expected a parameter of one of torch\.float32"):
        adapter.held_parameters()


def test_experts_that_do_not_say_how_they_are_cut_are_refused() -> None:
    """Transformer Engine's, over two tensor-parallel ranks: only their matrices are cut, and on one rank none is."""
    experts = {name: ModuleOf(weight=parameter(4, 6)) for name in ("linear_fc1", "norm")}
    model = ModuleOf(x=ModuleOf(experts=ModuleOf(**experts), shared=ModuleOf(linear_fc1=experts["linear_fc1"])))
    assert held(model)["x.experts.linear_fc1.weight"].shape == (4, 6)
    place("expert_tensor_parallel", 2, 0)
    with pytest.raises(ConfigError, match=r"x\.experts\.linear_fc1\.weight: expert tensor parallel 2 does not say how"):
        held(model)
    del model.x.experts.linear_fc1
    assert held(model)["x.shared.linear_fc1.weight"].shape == (4, 6)


class Optimizer:
    """Megatron's optimizer with whole masters; it derives them from the parameters when it is told."""

    reloads = 0

    def reload_model_params(self) -> None:
        self.reloads += 1


class DistributedOptimizer(Optimizer):
    """Megatron's distributed optimizer: this rank steps a range of each parameter."""

    def __init__(self, ranges: dict[nn.Parameter, tuple[int, int]]) -> None:
        self.model_param_gbuf_map = dict.fromkeys(ranges)
        self._of = ranges

    def _get_model_param_range_map(self, parameter: nn.Parameter) -> dict[str, Any]:
        begin, end = self._of[parameter]
        return {"param": SimpleNamespace(start=begin, end=end)}


def test_a_push_reads_what_the_optimizer_steps() -> None:
    """Masters where there are some, whole or this rank's range of them; otherwise the parameters themselves."""
    master = torch.full((6,), 7.0)
    coarse, fine = parameter(6, dtype=torch.bfloat16, main_param=master), parameter(6)
    one = held(ModuleOf(coarse=coarse, fine=fine), Optimizer())
    assert (
        elements(one["coarse"].reads) == [(i, 7.0) for i in range(6)] and one["coarse"].masters is one["coarse"].reads
    )
    assert one["fine"].reads is one["fine"].writes and one["fine"].masters == ()

    coarse.main_param = master[:2]  # type: ignore[attr-defined]
    elsewhere = parameter(6, dtype=torch.bfloat16)
    chained = SimpleNamespace(chained_optimizers=[DistributedOptimizer({coarse: (1, 3), fine: (4, 6)})])
    one = held(ModuleOf(coarse=coarse, fine=fine, elsewhere=elsewhere), chained)
    assert elements(one["coarse"].reads) == [(1, 7.0), (2, 7.0)] and one["coarse"].masters is one["coarse"].reads
    assert elements(one["fine"].reads) == [(4, 4.0), (5, 5.0)] and one["fine"].masters == ()
    assert one["elsewhere"].reads == () and len(elements(one["elsewhere"].writes)) == 6


def test_masters_that_are_not_found_are_refused() -> None:
    """Before an optimizer that is unknown here undoes the first pull."""
    coarse = parameter(6, dtype=torch.bfloat16, main_param=None)
    with pytest.raises(ConfigError, match="w: its fp32 master is in Megatron's optimizer, which would undo every pull"):
        held(ModuleOf(w=coarse))
    with pytest.raises(ConfigError, match=r"w: its fp32 master is not held as main_param \(use_precision_aware"):
        held(ModuleOf(w=coarse), DistributedOptimizer({coarse: (0, 2)}))
    offloading = SimpleNamespace(optimizer=type("HybridDeviceOptimizer", (), {})())
    with pytest.raises(ConfigError, match="CPU-offloading optimizer is not supported"):
        held(ModuleOf(w=coarse), offloading)


def test_masters_are_reloaded_by_an_optimizer_that_can() -> None:
    """After a pull; one that steps the parameters themselves has none, and no optimizer is none, too."""
    optimizer = Optimizer()
    for given in (optimizer, SimpleNamespace(), None):
        megatron().MegatronAdapter([ModuleOf(w=parameter(2))], given).reload_masters()
    assert optimizer.reloads == 1


def test_a_lazy_install_is_refused() -> None:
    """Its optimizer's masters are made from parameters all at once."""
    with pytest.raises(ConfigError, match="not supported for a Megatron-core model: use install: whole"):
        megatron().MegatronAdapter([nn.Linear(2, 2)]).read_groups()


class OfMegatron(ModuleOf):
    """A module of Megatron-core among others."""

    __module__ = "megatron.core.transformer.mlp"


def test_one_module_of_megatron_makes_a_model_its_own() -> None:
    """Tensors of a wrapper's own or of a script's head do not matter."""
    model = nn.Sequential(nn.Linear(2, 2), OfMegatron(weight=parameter(2, 2)))
    assert isinstance(choose_adapter(model), megatron().MegatronAdapter)
    assert isinstance(choose_adapter(model[:1]), TorchAdapter)
