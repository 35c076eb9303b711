"""The released torchtitan takes part: its loss falls, its checkpoints resume, its experts are exact. Slow, and apart.

torchtitan asks for versions of datasets and huggingface_hub that do not go together with transformers, so it has an
environment of its own: `make frameworks` makes .venv-frameworks.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration import cluster_harness as harness

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = Path(os.environ.get("DIPS_FRAMEWORKS", ROOT / ".venv-frameworks"))
PYTHON = ENVIRONMENT / "bin" / "python"
pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason="no torchtitan here (make frameworks): its module is NOT tested"),
]


def run_titan(directory: Path, kind: str, versions: int, **options: Any) -> tuple[list[Any], list[Any], Path]:
    """A run of one torchtitan cluster; what its ranks found, the history, the exported model."""
    script, start = str(HERE / "train_torchtitan.py"), directory / "start.npz"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([PYTHON, script, "start", str(start), kind], env=environment, check=True, timeout=100)
    shared = {"stop": {"versions": versions}, "outer": {"lr": 0.7, "momentum": 0.5, "clip": {}}, **options}
    ranks = [str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with harness.Run(directory, dict(np.load(start)), shared=shared) as run:
        run.start_servers()
        command = [*ranks, script, "train", str(directory / "found"), kind]
        run.wait(run.start_cluster("titan", command, steps=6, max_restarts=1), 240)
        history = run.versions()
        exported = directory / "model.safetensors"
        run.export(exported)
    return [json.loads((directory / f"found.{rank}").read_text()) for rank in range(2)], history, exported


def digests(file: Path) -> dict[str, str]:
    return {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in load_file(file).items()}


def test_a_job_that_breaks_off_goes_on_from_torchtitans_checkpoint(tmp_path: Path) -> None:
    """It breaks off 4 steps after an outer step and 2 after a save, resumes there, and ends with θ on both ranks."""
    found, history, exported = run_titan(tmp_path, "dense", 6)
    assert (tmp_path / "broken-off").read_text().startswith("v1@")
    for of in found:
        assert of["theta"] == digests(exported) and of["sharded"] == len(of["theta"])
        assert of["losses"][-1] < of["losses"][0], of["losses"]
        assert len(of["losses"]) == of["steps"] - 8, "it went on after step 8"
    assert len(history) == 6 and all(fold.loss > 0 for r in history for fold in r.folds)
    assert sum(r.tokens for r in history) == 6 * 6 * 2 * 2 * 16, "6 steps of 2 ranks with 2 sequences of 16"


def test_experts_that_are_parallel_and_sharded_are_exact_on_four_ranks(tmp_path: Path) -> None:
    """torch's strided shards: what is pushed is what torch gathers, what is pulled is what torch gathers afterwards."""
    words = [str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = [str(HERE / "train_torchtitan.py"), "check", str(tmp_path / "found"), "experts"]
    subprocess.run([*words, *script], env=environment, check=True, timeout=200)
    for rank in range(4):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        assert found["push"] == found["pull"] == found["bias"] == [], rank
        assert "StridedShard" in found["placements"][0]


def test_experts_in_parallel_hold_theta_and_share_their_bias(tmp_path: Path) -> None:
    """Each rank has half of the experts; parameters and the balancing bias are those of the run at the end."""
    found, history, exported = run_titan(tmp_path, "experts", 4, share_buffers=["*.expert_bias_E"])
    theta, tensors = digests(exported), load_file(exported)
    assert len(history) == 4
    for of in found:
        assert {shape[0] for shape in of["held"].values()} == {2}, "of 4 experts"
        assert of["theta"] == theta
        assert of["losses"][-1] < of["losses"][0], of["losses"]
    assert all(np.abs(tensors[f"layers.{l}.moe.expert_bias_E"]).max() > 0 for l in range(2))
