"""A cluster's own checkpoint: resuming is exact, and one that the run has overtaken is healed and said so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dips.protocol.manifest import Manifest
from tests.integration.test_overlap import HERE, constant, harness

H, RANGES = 10, 12


def ran(directory: Path, save_at: int, crash_at: int, codec: str = "fp32") -> tuple[list[str], list[Any], list[str]]:
    """Play a run of one cluster; return its log, the accepted pushes in order, and its snapshots' digests."""
    directory.mkdir()
    rng = np.random.default_rng(1)
    model = constant.ConstantModel()
    tensors = {n: rng.standard_normal(tuple(p.shape), dtype=np.float32) for n, p in model.named_parameters()}
    shared = {"data": {"ranges": RANGES}, "penalty": {"gates": []}, "codec": codec}
    out = directory / "out"
    command = [sys.executable, str(HERE / "train_checkpoint.py"), str(out), str(save_at), str(crash_at)]
    with harness.Run(directory, tensors, shared=shared) as run:
        run.start_servers()
        run.wait(run.start_cluster("a", command, steps=H, max_restarts=1), 90)
        with run.ledger() as ledger:
            rounds = [r for r in ledger.read_history(1000) if r.version is not None]
            digests = [d for (d,) in ledger._db.execute("SELECT digest FROM digests ORDER BY round, slave")]
    folds = [(f.tokens, f.inner_steps, f.ranges, f.norm, f.loss) for r in rounds for f in r.folds]
    assert Manifest.from_shapes((n, t.shape) for n, t in tensors.items()).numel > 0
    return out.read_text().splitlines(), folds, digests


@pytest.mark.timeout(240)
@pytest.mark.parametrize("codec", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_resuming_from_a_checkpoint_is_exact(tmp_path: Path, codec: str) -> None:
    """Saved in the middle of a range and of H, crashed later: the same batches, pushes, norms and snapshots follow."""
    whole, pushes, digests = ran(tmp_path / "whole", 0, 0, codec)
    lines, again, digests_again = ran(tmp_path / "crashed", 26, 29, codec)
    said = [line for line in lines if line.startswith("#")]
    assert len(said) == 1 and "resumed on v2@" in said[0]
    cut = lines.index(said[0])
    assert lines[:26] + lines[cut + 1 :] == whole, "the steps after the checkpoint were taken again, none twice else"
    assert again == pushes and len(pushes) == -(-RANGES * 4 // H), "the last push carries the rest"
    assert digests_again == digests


@pytest.mark.timeout(240)
def test_a_checkpoint_that_the_run_has_overtaken_is_healed(tmp_path: Path) -> None:
    """A push was settled after it was saved: the head is pulled, and no range is trained twice in the lineage."""
    lines, pushes, _ = ran(tmp_path / "run", 26, 35)
    said = [line for line in lines if line.startswith("#")]
    why = "overtaken: 1 pushes of a were settled or rolled back since it was saved; pulled v3@"
    assert len(said) == 1 and why in said[0]
    trained = [r for _, _, ranges, *_ in pushes for r in ranges]
    assert len(trained) == len(set(trained))
