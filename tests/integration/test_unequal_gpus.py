"""`configs/examples/unequal_gpus.py` on two real ranks: unequal shares have the gradients of one process.

The ranks run this file, too: torchrun --nproc-per-node 2 test_unequal_gpus.py OUT PLAN.yaml
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from dips.inside.planning.plan import Framework, make_plan, plan_data
from dips.inside.planning.profile import parse_model, parse_profile
from tests.integration.test_adapters import load_example, under_torchrun

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]
CASES: dict[str, tuple[list[tuple[int, int]], bool] | None] = {
    "planned": None,
    "equal": ([(4, 2), (4, 2)], False),
    "equal, once": ([(4, 2), (4, 2)], True),
    "one each": ([(6, 1), (2, 1)], False),
    "uneven cuts": ([(5, 3), (3, 1)], False),
}
SAMPLES = 8


def plan_two_devices() -> dict[str, Any]:
    """A plan of two devices of which one is three times as fast; their slow link has layers gathered once a step."""
    profile = {
        "nodes": [{"name": "big", "kind": "big"}, {"name": "small", "kind": "small"}],
        "kinds": {"big": {"memory_gb": 80, "tflops": 90}, "small": {"memory_gb": 80, "tflops": 30}},
        "links": {"site": {"site": 1}},
    }
    shape = {"blocks": 5, "hidden": 2048, "ffn": 8192, "vocab": 256}
    model = {"name": "decoder", "batch": SAMPLES, "sequence": 512, "transformer": shape}
    return plan_data(make_plan(parse_profile(profile, "profile"), parse_model(model, "model"), Framework.FSDP2))


def check_gradients(shares: list[tuple[int, int]], once: bool, example: Any) -> dict[str, Any]:
    """Return the worst relative error of a full gradient against one process, and the same of the loss; float64. And
    how often a layer was gathered.
    """
    sequences = torch.arange(SAMPLES)[:, None] * 7 + torch.arange(17) ** 2 % 31

    def make() -> Any:
        torch.manual_seed(3)
        return example.Decoder(example.Decoder().shape)

    alone = make()
    whole = torch.nn.functional.cross_entropy(alone(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())
    whole.backward()
    model = example.shard(make(), shares, once)
    gather = _fsdp_param_group.foreach_all_gather
    with patch.object(_fsdp_param_group, "foreach_all_gather", wraps=gather) as gathers:
        loss = example.compute_gradients(model, sequences, shares, dist.get_rank(), once)
    each = gathers.call_count / (len(model.layers) + 1)
    dist.all_reduce(loss)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    errors = [((p.grad.full_tensor() - q.grad).norm() / q.grad.norm()).item() for p, q in pairs]
    return {"gradient": max(errors), "loss": abs(loss.item() / whole.item() - 1), "shares": shares, "gathers": each}


def run_rank(out: Path, plan: Path) -> None:
    """All cases on this rank."""
    example = load_example("unequal_gpus")
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    found = {case: check_gradients(*(of or example.read_shares(plan)), example) for case, of in CASES.items()}
    out.with_name(f"{out.name}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks found."""
    directory = tmp_path_factory.mktemp("shares")
    (directory / "plan.yaml").write_text(yaml.safe_dump(plan_two_devices()))
    script, words = Path(__file__).name, str(directory / "plan.yaml")
    return under_torchrun(2, directory / "found", script, words, within_s=100)


@pytest.mark.parametrize("case", CASES)
def test_unequal_shares_have_the_gradients_of_one_process(found: list[dict[str, Any]], case: str) -> None:
    """To 1e-12, each rank's whole gradients and the loss: 3 : 1 as planned, equal, one micro-batch each, odd cuts."""
    for of in found:
        assert of[case]["gradient"] < 1e-12, of[case]
        assert of[case]["loss"] < 1e-12, of[case]


def test_a_plan_of_one_stage_gathers_once(found: list[dict[str, Any]]) -> None:
    """As it was predicted: with equal shares each of several micro-batches gathered and reduced everything."""
    for of in found:
        assert of["planned"]["gathers"] == of["equal, once"]["gathers"] == 1 < of["equal"]["gathers"], of


def test_the_plan_has_the_shares(found: list[dict[str, Any]]) -> None:
    """Three micro-batches for the device of three times the speed."""
    assert found[0]["planned"]["shares"] == [[6, 3], [2, 1]]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_rank(Path(sys.argv[1]), Path(sys.argv[2]))
