"""Buffers that the clusters share: held, pushed and installed like parameters, in a layer of their own; or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dips.client.parallel import HostMemory, full_parameters, lay_out
from dips.client.parallel.devices import ModelMemory
from dips.client.rank.agent_client import JobCollectives
from dips.errors import ConfigError
from dips.protocol.grouping import AVERAGED_LAYER, Grouping
from dips.protocol.manifest import Manifest


class Router(nn.Module):
    """What a mixture of experts keeps beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 3, bias=False)
        self.register_buffer("expert_bias", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Router(), Router()])


def test_they_are_pushed_and_installed_with_the_parameters() -> None:
    """In the last layer, by their names; those that no pattern names stay as they are."""
    model = Mixture()
    layout = lay_out(model, JobCollectives(), grouping=Grouping(share_buffers=("*.expert_bias",)))
    assert [layer.name for layer in layout.plan.manifest.layers] == ["layers.0", "layers.1", AVERAGED_LAYER]
    assert [p.name for p in layout.plan.manifest.layers[2].parameters] == [
        "layers.0.expert_bias",
        "layers.1.expert_bias",
    ]
    memory = HostMemory(layout.adapter, layout.held, layout.plan, JobCollectives())
    memory.gather_pieces()
    last = [piece for piece in memory.pieces if piece.layer == 2]
    assert [piece.array.tolist() for piece in last] == [[1.0, 2.0, 3.0]] * 2
    for piece in last:
        piece.array[:] = 0.5
    memory.scatter_pieces()
    memory.install_shard()
    assert all(router.expert_bias.tolist() == [0.5] * 3 for router in model.layers)


def test_a_buffer_that_is_replaced_is_noticed() -> None:
    """`self.expert_bias = other` after OuterLoop: the model is refused at the next push, as with a parameter."""
    model = Mixture()
    layout = lay_out(model, JobCollectives(), grouping=Grouping(share_buffers=("*.expert_bias",)))
    memory = ModelMemory(layout.adapter, layout.held)
    assert memory.compare_memory()[0] == ""
    model.layers[1].expert_bias = torch.zeros(3)
    assert memory.compare_memory()[0] == "layers.1.expert_bias"


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("*.seen",), r"layers\.0\.seen is a buffer of torch\.int64, of which there is no mean"),
        (("*",), r"layers\.0\.gate\.weight is a trainable parameter, which is shared anyway"),
        (("*.expert_bias", "*.expert_bais"), r"no buffer's name matches '\*\.expert_bais'; `model\.named_buffers"),
    ],
)
def test_what_cannot_be_averaged_is_refused_by_name(patterns: tuple[str, ...], message: str) -> None:
    """Integers, parameters, a pattern that names nothing; by the ranks and by `dips init --factory` alike."""
    with pytest.raises(ConfigError, match=message):
        lay_out(Mixture(), JobCollectives(), grouping=Grouping(share_buffers=patterns))
    with pytest.raises(ConfigError, match=message):
        full_parameters(Mixture(), patterns)


def test_the_run_and_a_cluster_see_one_model() -> None:
    """What `dips init` makes of names and shapes is what a rank lays out; without the pattern they differ by name."""
    grouping = Grouping(share_buffers=("*.expert_bias",))
    tensors, _ = full_parameters(Mixture(), grouping.share_buffers)
    of_run = Manifest.from_shapes(((n, tuple(t.shape)) for n, t in tensors.items()), grouping)
    assert lay_out(Mixture(), JobCollectives(), grouping=grouping).plan.manifest == of_run
    other = Manifest.from_shapes((n, tuple(t.shape)) for n, t in tensors.items())
    assert of_run.describe_differences(other)[0] == (
        "layers.0.expert_bias: expected a buffer of shared.share_buffers, got a parameter"
    )
    assert Manifest.from_json(of_run.to_json()) == of_run


def test_lazy_installs_are_refused() -> None:
    """No hook runs before a buffer is read."""
    layout = lay_out(Mixture(), JobCollectives(), grouping=Grouping(share_buffers=("*.expert_bias",)))
    with pytest.raises(ConfigError, match=r"install: lazy does not write shared\.share_buffers"):
        layout.adapter.read_groups()


def test_they_are_exported_and_loaded(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """`dips.load` fills parameters and the buffers that are in the file."""
    from safetensors.numpy import save_file

    from dips.client.load import load_version

    tensors, _ = full_parameters(Mixture(), ["*.expert_bias"])
    save_file({n: np.full(tuple(t.shape), 4.0, np.float32) for n, t in tensors.items()}, tmp_path / "m.safetensors")
    model = Mixture()
    load_version(model, tmp_path / "m.safetensors")
    assert all(router.expert_bias.tolist() == [4.0] * 3 for router in model.layers)
    assert float(model.layers[0].gate.weight.detach().min()) == 4.0
    with torch.device("meta"):
        nowhere = Mixture()
    with pytest.raises(ConfigError, match=r"expected a whole parameter on this process.*not on meta"):
        load_version(nowhere, tmp_path / "m.safetensors")
