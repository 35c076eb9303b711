"""A model's layers in parts: names, values and random numbers are those of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dips.errors import ConfigError
from dips.inside.pipeline.parts import build_layers, make_part
from dips.inside.pipeline.torch_runtime import _make_buffer

ROOT = Path(__file__).parents[4]
CPU = torch.device("cpu")


def layers() -> Iterator[tuple[str, nn.Module]]:
    yield "embed", nn.Embedding(7, 4)
    for i in range(3):
        yield f"blocks.{i}", nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    yield "head", nn.Linear(4, 7)


def test_a_part_is_of_the_whole_model() -> None:
    """Names and first values are those of the model that one process builds under the seed; the rest has no memory."""
    (first, second), shapes = build_layers(layers, 3, [range(2), range(2, 5)])
    torch.manual_seed(3)
    whole = dict(layers())
    assert list(first) == ["embed", "blocks.0"] and shapes.names == list(whole)
    part = make_part(second, 2, 3, False, CPU, None)
    assert [name for name, _ in part.named_parameters()] == [
        "blocks.1.0.weight", "blocks.1.0.bias", "blocks.2.0.weight", "blocks.2.0.bias", "head.weight", "head.bias"
    ]  # fmt: skip
    for name, layer in second.items():
        for got, wanted in zip(layer.parameters(), whole[name].parameters(), strict=True):
            assert torch.equal(got, wanted)
    traced = shapes.trace(torch.zeros(2, 5, dtype=torch.long))
    assert [list(shape) for shape, _ in traced] == [[2, 5, 4]] * 4 + [[2, 5, 7]]
    kept = sum(
        parameter.numel() for parameters in (first, second) for l in parameters.values() for parameter in l.parameters()
    )
    assert kept == sum(p.numel() for layer in whole.values() for p in layer.parameters())


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_of_step_layer_and_microbatch(recompute: bool) -> None:
    """However the layers are cut, and whether they are computed again in the backward, a micro-batch's random numbers
    are the same; another's and another step's are not. The caller's generator is left as it was.
    """

    def run(cut: int, step: int, microbatch: int) -> list[torch.Tensor]:
        halves, _ = build_layers(layers, 0, [range(cut), range(cut, 5)])
        parts = [make_part(half, at, 0, recompute, CPU, None) for half, at in zip(halves, (0, cut), strict=True)]
        x = torch.arange(5)
        for part in parts:
            with part.seeded(step, microbatch):
                x = part(x)
        x.square().sum().backward()
        return [x.detach(), *(p.grad for part in parts for p in part.parameters() if p.grad is not None)]

    torch.manual_seed(5)
    before = torch.get_rng_state()
    wanted = run(1, 0, 0)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(run(3, 0, 0), wanted, strict=True))
    assert not torch.equal(run(1, 1, 0)[0], wanted[0]) and not torch.equal(run(1, 0, 1)[0], wanted[0])


def test_an_accelerator_draws_by_the_same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generator is its own: a micro-batch that is computed again in the backward would drop other elements."""
    seeds, on_device = list[int](), torch.ones(2, device="meta")
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(manual_seed_all=seeds.append))
    part = make_part({"a": nn.Dropout(0.5), "b": nn.Dropout(0.5)}, 0, 0, False, CPU, None)
    for x in (on_device, torch.ones(2), on_device):
        with part.seeded(0, 0):
            part(x)
            assert x is not on_device or seeds[-1] == torch.initial_seed(), "and that of the host's"
    assert len(set(seeds)) == 2 and seeds == seeds[:2] * 2


def test_two_layers_draw_other_random_numbers() -> None:
    """Two layers of dropout alone drop more than one does."""
    part = make_part({"a": nn.Dropout(0.5), "b": nn.Dropout(0.5)}, 0, 0, False, CPU, None)
    one = make_part({"a": nn.Dropout(0.5)}, 0, 0, False, CPU, None)
    ones = torch.ones(1000)
    with part.seeded(0, 0):
        both = part(ones)
    with one.seeded(0, 0):
        first = one(ones)
    assert 600 < int((both == 0).sum()) < 900 and bool((both[first == 0] == 0).all())


class WrappedModel(nn.Module):
    """No sequence of layers."""


def test_a_shared_parameter_is_held_by_each_layer() -> None:
    """The later layers get copies of their own, also in one part and of a whole module; a frozen one is no tie."""

    def build() -> Iterator[nn.Module]:
        embed, head, frozen = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        head.weight = embed.weight
        yield from (embed, nn.Sequential(embed, nn.Tanh()), head, frozen, nn.Sequential(frozen))

    (kept,), shapes = build_layers(build, 0, [range(5)])
    assert shapes.ties == {"1.0.weight": "0.weight", "2.weight": "0.weight"}
    assert shapes.apart == {"3.weight", "3.bias", "4.0.weight", "4.0.bias"}
    weights = [next(layer.parameters()) for layer in kept.values()]
    assert len({id(weight) for weight in weights}) == 5
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    assert torch.equal(weights[3], weights[4])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a model": (
        WrappedModel,
        "expected the model's layers in order, as nn.Sequential or a generator, got WrappedModel",
    ),
    "a number": (lambda: 3, "expected the model's layers in order, as nn.Sequential or a generator, got int"),
    "a dictionary": (nn.ModuleDict, "as nn.Sequential or a generator, got ModuleDict"),
    "no module": (lambda: [nn.Tanh(), 3], "expected layer 1 to be a torch.nn.Module, got int"),
    "BatchNorm": (lambda: [nn.Sequential(nn.BatchNorm1d(4))], "layer 0.0: BatchNorm1d has statistics of the batch"),
    "twice": (lambda: [nn.Tanh()] * 2, "layers 0 and 1 are one module: make one for each"),
    "one name": (lambda: [("a", nn.Tanh()), ("a", nn.Tanh())], "got a twice"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_pipeline_cannot_run_is_refused(what: str) -> None:
    """Each by a sentence that names the layer."""
    build, told = REFUSED[what]
    with pytest.raises(ConfigError, match="layer") as refused:
        build_layers(build, 0, [range(2)])
    assert told in str(refused.value)


class Nearest(nn.Module):
    """Gives numbers of tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


def test_a_border_is_one_tensor_of_floats() -> None:
    """Two outputs cannot be sent on, nor integers; those of the last layer go over no border."""
    _, shapes = build_layers(lambda: [nn.Linear(4, 4), Nearest()], 0, [])
    assert shapes.trace(torch.zeros(2, 4))[1] == ((2,), torch.long)
    _, shapes = build_layers(lambda: [Nearest(), nn.Tanh()], 0, [])
    with pytest.raises(ConfigError, match="layer 0: expected one tensor of floats as its output, got Tensor"):
        shapes.trace(torch.zeros(2, 4))
    _, shapes = build_layers(lambda: [nn.LSTM(4, 4), nn.Linear(4, 4)], 0, [])
    with pytest.raises(ConfigError, match="layer 0: expected one tensor of floats as its output, got tuple"):
        shapes.trace(torch.zeros(2, 3, 4))
    _, shapes = build_layers(lambda: [nn.Linear(3, 4)], 0, [])
    with pytest.raises(ConfigError, match="layer 0: its output's shape cannot be found"):
        shapes.trace(torch.zeros(2, 4))


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private names are used, so a version that was not tested is refused by a sentence, when it is imported."""
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    path = ROOT / "dips" / "inside" / "pipeline" / "torch_runtime.py"
    with pytest.raises(ConfigError, match=r"dips.inside.pipeline: expected torch 2.13, got 2.14.0"):
        exec(compile(path.read_text(), path, "exec"), {"__name__": "another"})


def test_what_comes_over_a_border_lies_on_the_host() -> None:
    """gloo receives there, also where a script has made its accelerator torch's default device."""
    with torch.device("meta"):
        assert _make_buffer(((2, 3), torch.bfloat16)).device == CPU
