"""`install: lazy`: training goes on at once, and what it computes is what it computes with `install: whole`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_adapters import EXAMPLES, HERE, LAYOUTS, found, harness, load_example, under_torchrun

pytestmark = pytest.mark.torchrun


FAST = ("ddp", "fsdp")  # a few seconds each; the others are slow tests


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four ranks that went through those of torch's layouts that chosen tests ask for."""
    chosen = {item.name for item in request.session.items}
    kinds = [kind for kind in LAYOUTS if f"test_it_is_install_whole_bit_for_bit[{kind}]" in chosen]
    out = tmp_path_factory.mktemp("lazy") / "found"
    return under_torchrun(4, out, "check_lazy_install.py", *kinds, within_s=200)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST)) for kind in LAYOUTS]
)
def test_it_is_install_whole_bit_for_bit(four: list[dict[str, Any]], kind: str) -> None:
    """Before a forward, in it, after it; merged; with a block that nobody calls; on every rank."""
    assert all(len(of[kind]) >= 20 for of in four)
    for rank, of in enumerate(four):
        assert [what for what, is_so in of[kind].items() if not is_so] == [], f"rank {rank}"


def ran(
    directory: Path, install: str, overlap: str = "none", ranks: int = 2, script: str = "run_example.py"
) -> list[dict[str, Any]]:
    """Play a run of one cluster with torch's own example, FSDP2 on two ranks; return what its ranks ended with."""
    directory.mkdir()
    torch.manual_seed(1)
    tensors = {name: p.detach().numpy() for name, p in load_example("fsdp2").build().named_parameters()}
    outer = {"lr": 0.7, "momentum": 0.5, "clip": {"relative": 2.0}}
    shared = {"stop": {"versions": 4}, "outer": outer, "layers": "module"}
    words = [str(HERE / script), str(directory / "out"), *(["1"] if script == "run_example.py" else [])]
    words += [str(EXAMPLES / "fsdp2.py"), "--layout", "fsdp" if ranks > 1 else "plain"]
    with harness.Run(directory, tensors, shared=shared) as run:
        run.start_servers()
        command = [*harness.TORCHRUN, str(ranks), *words] if ranks > 1 else [sys.executable, *words]
        options = {"install": install, "overlap": overlap, "max_restarts": 1}
        run.wait(run.start_cluster("a", command, steps=3, **options), 150)
    return found(directory / "out", ranks)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_with_it_is_the_run_without(tmp_path: Path) -> None:
    """Every inner step has the same loss on every rank, and θ is the same at the end."""
    whole, lazy = ran(tmp_path / "whole", "whole"), ran(tmp_path / "lazy", "lazy")
    assert len(whole[0]["losses"]) == 12 and whole[0]["losses"][-1] < whole[0]["losses"][0]
    assert lazy == whole


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_it_goes_together_with_overlap_full(tmp_path: Path) -> None:
    """Trained beside the pull and merged by the forward: the loss falls, both ranks end with one θ."""
    of = ran(tmp_path / "run", "lazy", "full")
    assert of[0]["theta"] == of[1]["theta"]
    assert of[0]["losses"][-1] < of[0]["losses"][0] - 0.3
    assert len(of[0]["losses"]) > 4 * 3, "steps were taken beside what moved"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_killed_during_a_lazy_install_pulls_again(tmp_path: Path) -> None:
    """Some layers new, some old, and the process is gone: the next one goes on as after a death between two steps."""
    whole, lazy = (
        ran(tmp_path / install, install, ranks=1, script="train_lazy_install.py") for install in ("whole", "lazy")
    )
    installed, of = map(int, (tmp_path / "lazy" / "out.died").read_text().split(" of "))
    assert 0 < installed < of and (tmp_path / "whole" / "out.died").read_text() == "all"
    assert len(whole[0]["losses"]) == 3 * 3, "three of the four versions are of the second incarnation"
    assert lazy == whole
