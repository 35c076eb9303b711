"""The demo's model: it is what its docstrings say."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dips.demo.llama import convert
from dips.demo.model import BYTES, Decoder, Shape, build, loss_of, rotary_angles, rotate_pairs
from dips.protocol.manifest import Manifest

SMALL = Shape(width=16, layers=2, heads=2, hidden=24, context=32)


def test_size_and_first_loss() -> None:
    """The default has 1 to 3 million parameters and, drawn from any seed, begins at about ln 256 nats per byte."""
    torch.manual_seed(0)
    model = build()
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 3e6
    text = torch.randint(0, BYTES, (2, 65))
    assert abs(loss_of(model, text).item() - math.log(BYTES)) < 0.2


def test_parameters_are_the_whole_model() -> None:
    """There are no buffers, and nothing is tied: what the outer loop moves is all there is."""
    model = Decoder(SMALL)
    assert not list(model.buffers())
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_blocks_become_layers_of_the_manifest() -> None:
    """Each block is one unit of placement, beside embedding, norm and output."""
    shapes = [(name, tuple(p.shape)) for name, p in Decoder(SMALL).named_parameters()]
    names = [layer.name for layer in Manifest.from_shapes(shapes).layers]
    assert names == ["embedding", "layers.0", "layers.1", "norm", "output"]


def test_as_a_llama_of_transformers_it_computes_the_same(tmp_path: Path) -> None:
    """What the demo exports for from_pretrained; all parameters differ, so none can stand in for another."""
    torch.manual_seed(0)
    model = Decoder(SMALL)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.2, std=0.3)
    convert(model.state_dict(), SMALL).save_pretrained(tmp_path)
    text = torch.randint(0, BYTES, (3, 32))
    with torch.no_grad():
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(text).logits, model(text))


def test_no_byte_sees_the_future() -> None:
    """Changing the last byte changes no logit before it."""
    torch.manual_seed(0)
    model = Decoder(SMALL)
    text = torch.randint(0, BYTES, (1, 12))
    other = text.clone()
    other[0, -1] ^= 1
    with torch.no_grad():
        a, b = model(text), model(other)
    assert torch.equal(a[:, :-1], b[:, :-1])
    assert not torch.equal(a[:, -1], b[:, -1])


def test_rotation_is_relative() -> None:
    """The product of a turned query and a turned key depends on their distance alone."""
    rotation = rotary_angles(10, 8, torch.device("cpu"))
    query, key = torch.randn(1, 1, 1, 8).expand(1, 1, 10, 8), torch.randn(1, 1, 1, 8).expand(1, 1, 10, 8)
    products = rotate_pairs(query, rotation)[0, 0] @ rotate_pairs(key, rotation)[0, 0].T
    for distance in range(10):
        diagonal = products.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)


def test_it_learns() -> None:
    """Thirty steps on one text take it below half of its first loss."""
    torch.manual_seed(0)
    model = Decoder(SMALL)
    text = torch.tensor(list(b"to be or not to be, that is the question")).repeat(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    first = loss_of(model, text).item()
    for _ in range(30):
        optimizer.zero_grad()
        loss_of(model, text).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss_of(model, text).item() < first / 2
