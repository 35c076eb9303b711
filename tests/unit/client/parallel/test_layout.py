"""How a model lies on one process: names, what takes part, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dips.client.parallel import HostMemory, ModelLayout, lay_out
from dips.client.rank.agent_client import JobCollectives
from dips.errors import ConfigError


class Tied(nn.Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3)])
        self.output = nn.Linear(3, 4, bias=False)
        self.output.weight = self.embed.weight


def laid(model: nn.Module) -> tuple[ModelLayout, HostMemory]:
    layout = lay_out(model, JobCollectives())
    return layout, HostMemory(layout.adapter, layout.held, layout.plan, JobCollectives())


def test_a_plain_model_is_one_piece_each() -> None:
    """Every parameter is one piece from offset 0, in the order of names, tied ones once."""
    plan = lay_out(Tied(), JobCollectives()).plan
    assert [(l.name, [p.name for p in l.parameters]) for l in plan.manifest.layers] == [
        ("embed", ["embed.weight"]),
        ("layers.0", ["layers.0.weight"]),
        ("layers.1", ["layers.1.bias", "layers.1.weight"]),
    ]
    assert [tuple(piece) for piece in plan.pieces] == [(0, 0, 0, 12), (1, 0, 0, 9), (2, 0, 0, 3), (2, 1, 0, 9)]


def test_the_model_is_frozen_when_it_is_gathered_and_changes_when_it_is_installed() -> None:
    """Pieces are copies; what a pull brought reaches the parameters' own memory, and only then."""
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    _, memory = laid(model)
    memory.gather_pieces()
    with torch.no_grad():
        model.weight.zero_()
    assert np.array_equal(memory.pieces[1].array, before.numpy().reshape(-1))
    for piece in memory.pieces:
        piece.array[:] = 7.0
    assert not model.weight.any()
    memory.scatter_pieces()
    memory.install_shard()
    assert torch.equal(model.weight, torch.full((2, 2), 7.0)) and torch.equal(model.bias, torch.full((2,), 7.0))


def test_host_memory_is_4_bytes_a_parameter() -> None:
    """Pieces of a shard that is one run lie in the shard's own memory."""
    model = Tied()
    assert laid(model)[1].allocated_numel == sum(p.numel() for p in model.parameters())


def test_frozen_parameters_take_no_part() -> None:
    """The global model is what trains: adapters alone, if nothing else does."""
    model = Tied()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.layers[1].bias.requires_grad_(True)
    layout, memory = laid(model)
    assert [p.name for layer in layout.plan.manifest.layers for p in layer.parameters] == ["layers.1.bias"]
    kept = model.embed.weight.detach().clone()
    memory.pieces[0].array[:] = 5.0
    memory.scatter_pieces()
    memory.install_shard()
    assert torch.equal(model.embed.weight, kept) and torch.equal(model.layers[1].bias, torch.full((3,), 5.0))


def test_two_copies_of_a_tied_parameter_are_pushed_once_and_both_written() -> None:
    """As in the first and the last chunk of a pipeline on one rank."""
    chunks = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
    with torch.no_grad():
        chunks[1].weight.copy_(chunks[0].weight)
    layout = lay_out(chunks, JobCollectives())
    memory = HostMemory(layout.adapter, layout.held, layout.plan, JobCollectives())
    memory.gather_pieces()
    assert [tuple(piece) for piece in layout.plan.pieces] == [(0, 0, 0, 4)]
    assert np.array_equal(memory.pieces[0].array, chunks[0].weight.detach().numpy().reshape(-1))
    memory.pieces[0].array[:] = 3.0
    memory.scatter_pieces()
    memory.install_shard()
    assert all(torch.equal(chunk.weight, torch.full((2, 2), 3.0)) for chunk in chunks)
    with pytest.raises(ConfigError, match=r"weight: shape \(2, 2\) in one chunk of the model, \(3, 2\) in another"):
        lay_out([nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)], JobCollectives())


def test_two_models_in_one_list_are_no_copies_of_one() -> None:
    """Two towers with the same names: each pull would have overwritten the second by the first, and nothing said so."""
    with pytest.raises(ConfigError, match="weight: two parts of the model have a parameter of this name, of different"):
        lay_out([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)], JobCollectives())


def test_a_model_without_trainable_parameters_is_refused() -> None:
    """Nothing would travel."""
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter with requires_grad"):
        lay_out(model, JobCollectives())


def test_a_bf16_parameter_is_pushed_as_it_is_and_rounded_when_installed() -> None:
    """Without masters the parameter itself takes part: exact on the way out, the nearest bf16 on the way in."""
    model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    _, memory = laid(model)
    memory.gather_pieces()
    assert np.array_equal(memory.pieces[0].array, model.weight.detach().float().numpy().reshape(-1))
    memory.pieces[0].array[:] = 1.00390625  # 1 + 2^-8: half a unit in the last place of bf16 above 1
    memory.scatter_pieces()
    memory.install_shard()
    assert torch.equal(model.weight, torch.ones(2, 3, dtype=torch.bfloat16))


def test_wrappers_leave_no_trace_in_names() -> None:
    """A compiled model has the manifest of the model within."""
    model = Tied()
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    assert lay_out(compiled, JobCollectives()).plan.manifest == lay_out(model, JobCollectives()).plan.manifest


def test_wrong_dtype_is_named() -> None:
    """What fp32 does not hold exactly is refused; the error names the first such parameter."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.float64))
    with pytest.raises(ConfigError, match=r"1\.weight: expected a parameter of one of torch\.float32.*float64"):
        lay_out(model, JobCollectives())


def test_memory_that_is_not_contiguous_is_named() -> None:
    """A transposed parameter has no flat view."""
    model = nn.Linear(2, 3, bias=False)
    model.weight = nn.Parameter(torch.zeros(2, 3).t())
    with pytest.raises(ConfigError, match="weight: its memory"):
        lay_out(model, JobCollectives())


class FullyShardedDataParallel(nn.Linear):
    """Stands in for a wrapper whose construction needs a process group: it is known by module and name."""

    __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"


def test_a_model_that_no_adapter_knows_is_refused_with_what_is_supported() -> None:
    """FSDP1 and DeepSpeed are named, with what to use instead; what is no module is, too."""
    with pytest.raises(ConfigError, match=r"FSDP1 flattens parameters; use fully_shard.*supported: plain, DDP"):
        lay_out(nn.Sequential(FullyShardedDataParallel(2, 2)), JobCollectives())
    model = nn.Linear(2, 2)
    model.weight.ds_id = 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"ZeRO-3; use fully_shard.*supported: plain"):
        lay_out(model, JobCollectives())
    model = nn.Linear(2, 2)
    model.weight._hp_mapping = None  # type: ignore[assignment]  # of this rank's partition; the bias is another rank's
    with pytest.raises(ConfigError, match=r"DeepSpeed ZeRO keeps fp32 masters.*use fully_shard"):
        lay_out(model, JobCollectives())
    wrong: dict[str, list[Any]] = {"str": ["model"], "Linear, str": [nn.Linear(2, 2), "model"], "an empty list": []}
    for found, parts in wrong.items():
        with pytest.raises(ConfigError, match=rf"expected a torch\.nn\.Module or a list of them, got {found};"):
            lay_out(parts, JobCollectives())
