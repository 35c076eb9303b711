"""How a model lies on one process: names, pieces, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dips.client.parallel import shards
from dips.errors import ConfigError


class Tied(nn.Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3)])
        self.output = nn.Linear(3, 4, bias=False)
        self.output.weight = self.embed.weight


def test_plain_model_is_all_on_the_first_rank() -> None:
    """Every parameter is one piece from offset 0, in the model's order, tied ones once; other ranks push nothing."""
    model = Tied()
    first, other = shards(model, 0), shards(model, 1)
    assert [(l.name, [p.name for p in l.parameters]) for l in first.manifest.layers] == [
        ("embed", ["embed.weight"]),
        ("layers.0", ["layers.0.weight"]),
        ("layers.1", ["layers.1.weight", "layers.1.bias"]),
    ]
    assert [(p.layer, p.param, p.offset, p.length) for p in first.pieces] == [
        (0, 0, 0, 12),
        (1, 0, 0, 9),
        (2, 0, 0, 9),
        (2, 1, 0, 3),
    ]
    assert len(first.spoken) == 4 and not other.spoken and len(other.pieces) == 4
    assert first.manifest.digest == other.manifest.digest


def test_a_piece_is_the_parameters_own_memory() -> None:
    """Writing to a view is installing."""
    model = nn.Linear(2, 2)
    for piece in shards(model).pieces:
        piece.view.fill_(7.0)
    assert torch.equal(model.weight, torch.full((2, 2), 7.0)) and torch.equal(model.bias, torch.full((2,), 7.0))


def test_wrappers_leave_no_trace_in_names() -> None:
    """A compiled model has the manifest of the model within."""
    model = Tied()
    assert shards(torch.compile(model, backend="eager")).manifest.digest == shards(model).manifest.digest  # type: ignore[arg-type]


def test_wrong_dtype_is_named() -> None:
    """Only fp32 parameters take part; the error names the first that is not."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    with pytest.raises(ConfigError, match=r"1\.weight: expected a parameter of torch\.float32, got torch\.bfloat16"):
        shards(model)


def test_memory_that_is_not_contiguous_is_named() -> None:
    """A transposed parameter has no flat view."""
    model = nn.Linear(2, 3, bias=False)
    model.weight = nn.Parameter(torch.zeros(2, 3).t())
    with pytest.raises(ConfigError, match="weight: its memory"):
        shards(model)
