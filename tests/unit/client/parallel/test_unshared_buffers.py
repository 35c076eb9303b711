"""Buffers that nobody shares are named: where a run is made, once they have trained, and where an export lacks them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dips.client.load import load_version
from dips.client.parallel.unshared_buffers import BufferWatch, advise_run

LINE = r'share_buffers: \["\*running_mean", "\*running_var"\]'


class Normed(nn.Module):
    """With running means, a constant, and a table that is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table.add_(1.0)
        return self.bn(x)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_run_is_made_with_the_line_to_add() -> None:
    """All that are kept in a state_dict; none of a model without any, or whose buffers are shared."""
    told = advise_run(Normed(), ())
    assert told.startswith("not shared: the buffers scale, bn.running_mean, bn.running_var.")
    assert told.endswith('write share_buffers: ["*scale", "*running_mean", "*running_var"]')
    assert advise_run(Normed(), ("*running*",)).startswith("not shared: the buffers scale.")
    assert advise_run(nn.Linear(2, 2), ()) == "" == advise_run(Normed(), ("*",))


def test_what_has_trained_is_named_once() -> None:
    """Not the constant, nor what is not kept; wrapped or not, by the model's own names."""
    model = Normed()
    watch = BufferWatch([torch.compile(model, backend="eager")], ())
    model.train()(torch.randn(4, 3))
    told = watch.describe_changed()
    assert told.startswith("bn.running_mean, bn.running_var: buffers that train and are not shared")
    assert told.endswith('share_buffers: ["*running_mean", "*running_var"]')
    assert watch.describe_changed() == ""
    still = BufferWatch([model], ())
    model.eval()(torch.randn(4, 3))
    assert still.describe_changed() == ""


def test_an_export_without_them_is_told_when_it_is_loaded(tmp_path: Path) -> None:
    """One that has them is not."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    save_file(parameters(model), tmp_path / "m.safetensors")
    with pytest.warns(UserWarning, match=f"does not hold the buffers 0.running_mean, 0.running_var.*{LINE}"):
        load_version(model, tmp_path / "m.safetensors")
    kept = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    save_file(parameters(model) | kept, tmp_path / "m.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_version(model, tmp_path / "m.safetensors")
