"""Asynchronous torch.distributed.checkpoint saves during pushes: each exactly its moment's state, nobody waits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.integration.test_overlap import HERE, constant, harness

SAVES = 2
DELTA = 2.0**-10


@pytest.mark.torchrun
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("overlap", "install"),
    [
        ("full", "whole"),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in (("none", "lazy"), ("full", "lazy"))),
    ],
)
def test_a_save_and_a_push_tear_nothing_and_wait_for_nothing_of_each_other(
    tmp_path: Path, overlap: str, install: str
) -> None:
    """Two FSDP2 ranks. A save is written after the push, or while it is out; both hold the steps before them, all of
    them, on every element; the outer step is over while the save is not, and the save while the push is not."""
    tensors = {n: np.zeros(tuple(p.shape), np.float32) for n, p in constant.ConstantModel().named_parameters()}
    shared = {
        "stop": {"versions": SAVES},
        "outer": {"lr": 1.0, "momentum": 0.0, "step": "nesterov", "clip": {}},
        "penalty": {"gates": []},
    }
    command = [*harness.TORCHRUN, "2", str(HERE / "train_dcp.py"), str(tmp_path / "found"), str(SAVES)]
    with harness.Run(tmp_path, tensors, shared=shared, slaves=1) as run:
        run.start_servers()
        run.wait(run.start_cluster("a", command, steps=10_000, overlap=overlap, install=install), 150)
        rounds = run.versions()
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)]
    pushed = sum(fold.inner_steps for r in rounds for fold in r.folds)
    assert len(rounds) == SAVES and pushed <= found[0]["steps"]
    assert {f["end"] for f in found} <= {pushed * DELTA, None}, "the last version holds the steps before its freeze"
    for rank, of in enumerate(found):
        assert len(of["saves"]) == SAVES
        for number, should, inner_steps in of["saves"]:
            assert number in (should, None) and inner_steps, (rank, of["saves"])
