"""`dips profile`: which pairs are measured, and the files that come of it; under torchrun with real ranks in make
test-slow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands.profile import _first_tensor, deal_pairs, fit_line, make_files
from dips.errors import ConfigError
from dips.inside.planning.profile import parse_model, parse_profile

FACTORY = """
import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 32)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(32, 100)
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
def build():
    return Model()
"""


def place(node: str, kind: str = "fast", site: str = "east") -> dict[str, Any]:
    return {"node": node, "kind": kind, "site": site, "memory_gb": 16.0, "tflops": 10.0}


def test_each_kind_of_pair_is_measured_once_and_disjoint_pairs_together() -> None:
    """Two nodes of two equal devices and one of another kind elsewhere: inside, between nodes, to the other; the
    first two share no round where they share a rank.
    """
    places = [place("a"), place("a"), place("b"), place("b"), place("c", "slow", "west")]
    rounds = deal_pairs(places)
    assert sorted(pair for made in rounds for pair in made) == [(0, 1), (0, 2), (0, 4)]
    for made in rounds:
        ranks = [rank for pair in made for rank in pair]
        assert len(ranks) == len(set(ranks))
    apart = deal_pairs([place("a", "one"), place("a", "one"), place("b", "two"), place("b", "two")])
    assert [(0, 1), (2, 3)] in apart


def test_a_line_goes_through_three_micro_batches() -> None:
    """Slope a sample and what any micro-batch takes; noise gives no negative figure."""
    assert fit_line((1, 2, 4), (0.3, 0.5, 0.9)) == [0.2, 0.1]
    assert fit_line((1, 2, 4), (0.9, 0.5, 0.3))[0] == 0.0
    assert fit_line((1, 2, 4), (0.1, 0.3, 0.7)) == [0.2, 0.0]


def test_the_files_are_what_the_planner_reads() -> None:
    """Both are parsed; the slowest of several pairs between two sites counts, for both ways."""
    row = {
        "seconds": [(0.1, 0.2, 0.3)] * 3,
        "parameters": 10,
        "flops": 1.0,
        "activation_bytes": 2.0,
        "border_bytes": 3.0,
    }
    places = [place("a"), place("a"), place("b", site="west"), place("c", "slow", site="west")]
    links = {(0, 1): (1e-5, 1e10), (0, 2): (1e-3, 2e8), (0, 3): (1e-3, 1e8), (2, 3): (1e-4, 1e9)}
    machines, needs = make_files(places, links, [{"block": row}, {}, {}, {"block": row}], "mymodel", 512, 8)
    profile, model = parse_profile(machines, "profile.yaml"), parse_model(needs, "model.yaml")
    assert list(profile.places) == ["a.0", "a.1", "b.0", "c.0"]
    assert profile.links["east"]["west"].gbit == profile.links["west"]["east"].gbit == 0.8
    assert profile.kinds["fast"].inside_gbit == 80
    assert profile.measured["slow"]["block"].weight == (0.0, 0.3)
    assert (model.batch, model.sequence, model.parameters) == (8, 512, 10)


def test_a_layer_may_return_its_tensor_with_other_things() -> None:
    """In a tuple or a dict, where the first one counts; a layer without one cannot be timed."""
    tensor = torch.zeros(2)
    for output in (tensor, (None, tensor, torch.ones(1)), {"mask": None, "hidden": tensor}):
        assert _first_tensor(output) is tensor
    with pytest.raises(ConfigError, match="expected layers that return tensors, got tuple"):
        _first_tensor((None, 3))


def test_without_torchrun_it_says_how() -> None:
    """A sentence with the command to give, exit 78."""
    refused = CliRunner().invoke(cli, ["profile", "--factory", "mymodel:build"], env={"RANK": None}).exception
    assert isinstance(refused, ConfigError)
    assert "torchrun --nproc-per-node" in str(refused)


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_ranks_profile_a_model(tmp_path: Path) -> None:
    """Under torchrun with gloo: both files are written, are read, and have measured figures of each layer; bytes are
    printed by category.
    """
    (tmp_path / "mymodel.py").write_text(FACTORY)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dips.cli"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]),
    }
    done = subprocess.run(
        [*words, "profile", "--factory", "mymodel:build", "--tokens", "16"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parameters = 2 * 100 * 32 + 100 + 2 * (2 * 32 * 64 + 96)
    counted = {name: float(figure) for name, figure in re.findall(r"(\w+) ([\d.e-]+) MB", done.stdout)}
    assert counted["parameters"] == counted["gradients"] == pytest.approx(4 * parameters / 1e6, rel=0.01)
    assert 2 * counted["parameters"] < counted["peak"]
    profile = parse_profile(yaml.safe_load((tmp_path / "profile.yaml").read_text()), "profile.yaml")
    model = parse_model(yaml.safe_load((tmp_path / "model.yaml").read_text()), "model.yaml")
    assert len(profile.places) == 2
    assert [layer.name for layer in model.layers] == ["embedding", "blocks.0", "blocks.1", "head"]
    assert model.layers[1].parameters == 2 * 32 * 64 + 96
    assert model.layers[1].flops == 2 * 16 * 2 * 32 * 64
    assert model.layers[1].border_bytes == 16 * 32 * 4
    saved = sum(layer.activation_bytes for layer in model.layers) / 1e6
    assert saved / 2 < counted["activations"] < 2 * saved  # what autograd saves of each layer by itself
    measured = profile.measured["cpu"]
    assert set(measured) == {layer.name for layer in model.layers}
    assert sum(measured["head"].forward) > 0
    assert profile.kinds["cpu"].inside_gbit > 0
