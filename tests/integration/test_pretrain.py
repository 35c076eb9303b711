"""Megatron-LM's own `pretrain` takes part by two lines: tokens, loss, checkpoints, the end. Slow, and apart.

Its loop is in no package: `make frameworks` clones it beside the packages that it wants.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration.test_torchtitan import ENVIRONMENT, HERE, PYTHON, ROOT, harness

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (ENVIRONMENT / "megatron-lm").exists(),
        reason="no Megatron-LM here (make frameworks): its loop is NOT tested",
    ),
]


@pytest.mark.parametrize("words", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_megatrons_own_loop_trains_breaks_off_and_goes_on(tmp_path: Path, words: list[str]) -> None:
    """Two data-parallel ranks break off 2 iterations after a save; they resume it, and leave the loop with the run."""
    script, start = str(HERE / "pretrain_megatron.py"), tmp_path / "start.npz"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    subprocess.run([*ranks, "1", script, "start", str(start)], env=environment, check=True, timeout=100)
    shared = {"stop": {"versions": 5}, "outer": {"lr": 0.7, "momentum": 0.5, "clip": {}}}
    saves = ["--save", str(tmp_path / "saves"), "--load", str(tmp_path / "saves"), "--save-interval", "4"]
    with harness.Run(tmp_path, dict(np.load(start)), shared=shared) as run:
        run.start_servers()
        command = [*ranks, "2", script, "train", str(tmp_path / "found"), *saves, *words]
        run.wait(run.start_cluster("megatron", command, steps=6, max_restarts=1), 240)
        history = run.versions()
        exported = tmp_path / "model.safetensors"
        run.export(exported)
    theta = load_file(exported)
    for rank in range(2):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        assert found["exit"] == 0 and found["iteration"] == 29, "5 outer steps of 6"
        assert len(found["losses"]) == 30 - 8 and found["losses"][-1] < found["losses"][0], "it went on after 8"
        close = 1e-2 if words else 0.0
        for name, begin in found["theta"].items():
            assert np.abs(np.array(begin) - theta[name].reshape(-1)[:4]).max() <= close, name
    assert len(history) == 5 and all(fold.loss > 0 for r in history for fold in r.folds)
    assert sum(r.tokens for r in history) == 5 * 6 * 8 * 16, "6 steps of 8 sequences of 16"
