"""`install: forward`: training goes on at once, and what it computes is what it computes with `install: whole`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_adapters import EXAMPLES, HERE, LAYOUTS, found, harness, load, under_torchrun

pytestmark = pytest.mark.torchrun


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four ranks that went through all of torch's layouts."""
    out = tmp_path_factory.mktemp("forward") / "found"
    return under_torchrun(4, out, "check_forward.py", *LAYOUTS, within_s=200)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_it_is_install_whole_bit_for_bit(four: list[dict[str, Any]], kind: str) -> None:
    """Before a forward, in it, after it; merged; with a block that nobody calls; on every rank."""
    assert all(len(of[kind]) >= 20 for of in four)
    for rank, of in enumerate(four):
        assert [what for what, is_so in of[kind].items() if not is_so] == [], f"rank {rank}"


def ran(directory: Path, install: str, overlap: str) -> tuple[list[dict[str, Any]], Path]:
    """Play a run of one cluster of two FSDP2 ranks with torch's own example; return what its ranks ended with."""
    directory.mkdir()
    torch.manual_seed(1)
    tensors = {name: p.detach().numpy() for name, p in load("fsdp2", EXAMPLES).build().named_parameters()}
    shared = {"stop": {"versions": 4}, "outer": {"lr": 0.7, "momentum": 0.5, "clip": {"relative": 2.0}}}
    words = [str(HERE / "run_example.py"), str(directory / "out"), "1", "fsdp2", "--layout", "fsdp"]
    with harness.Run(directory, tensors, shared=shared) as run:
        run.start_master()
        run.start_slaves()
        command = [*harness.TORCHRUN, "2", *words]
        run.wait(run.start_cluster("a", command, steps=3, install=install, overlap=overlap), 100)
    return found(directory / "out", 2), run.timeline("a")


@pytest.mark.timeout(240)
def test_a_run_with_it_is_the_run_without(tmp_path: Path) -> None:
    """Every inner step has the same loss on every rank, and θ is the same at the end."""
    whole, _ = ran(tmp_path / "whole", "whole", "none")
    forward, _ = ran(tmp_path / "forward", "forward", "none")
    assert len(whole[0]["losses"]) == 12 and whole[0]["losses"][-1] < whole[0]["losses"][0]
    assert forward == whole


@pytest.mark.timeout(120)
def test_it_goes_together_with_overlap_full(tmp_path: Path) -> None:
    """Trained beside the pull and merged by the forward: the loss falls, both ranks end with one θ."""
    of, timeline = ran(tmp_path / "run", "forward", "full")
    assert of[0]["theta"] == of[1]["theta"]
    assert of[0]["losses"][-1] < of[0]["losses"][0] - 0.3
    assert any("merge" in line for line in timeline.read_text().splitlines()), json.dumps(of[0]["losses"])
