"""Ranks that do not call the outer loop alike end by a deadline, with the missing ranks named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.integration.test_overlap import HERE, constant, harness

DEADLINE_S = 3.0


@pytest.mark.torchrun
@pytest.mark.timeout(120)
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    """Rank 1 of three never reaches the push: the others raise after the deadline, rank 0 says who."""
    tensors = {n: np.zeros(tuple(p.shape), np.float32) for n, p in constant.ConstantModel().named_parameters()}
    out = tmp_path / "told"
    with harness.Run(tmp_path, tensors, slaves=1) as run:
        run.start_servers()
        command = [*harness.TORCHRUN, "3", str(HERE / "train_unequal.py"), str(out)]
        run.start_cluster("a", command, steps=1, collective_s=DEADLINE_S)
        run.until(lambda: len(list(tmp_path.glob("told.*"))) == 2, 60, "ranks 0 and 2 have the error")
    said = {rank: (tmp_path / f"told.{rank}").read_text() for rank in (0, 2)}
    for text in said.values():
        assert float(text.split()[0]) < DEADLINE_S + 5
        assert "not all 3 ranks reached OuterLoop.step within 3 s" in text
    assert "Ranks 1 failed" in said[0]
