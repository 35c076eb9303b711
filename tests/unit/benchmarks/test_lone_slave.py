"""A real slave under a scripted master: what the benchmarks of one slave stand on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.lone_slave import LoneSlave, equal_layers
from benchmarks.memory import outer_step
from benchmarks.rank import BenchRank
from dips.ids import GENESIS, VersionId


@pytest.mark.timeout(120)
def test_a_whole_outer_step_through_a_lone_slave(tmp_path: Path) -> None:
    """Two pushes of one θ_j, folded, applied, persisted, committed and pulled: the Nesterov step of their mean."""
    with LoneSlave(tmp_path, equal_layers(4096, 4), slots=2, pinned=1) as slave:
        assert slave.printed_sum() == slave.memory_sum.describe_sum()
        rank = BenchRank(slave)
        rank.pull()
        assert not rank.pulled.any(), "v0@r0 is zeros"
        made = outer_step(slave, rank, GENESIS, contributions=2, slots=2, pinned=1)
        rank.pull(made)
        assert 0 < slave.resident() <= slave.peak()
    assert made == VersionId(1, 1)
    np.testing.assert_allclose(rank.pulled, 0.7 * 1.8 * rank.pushed, rtol=1e-5, atol=1e-7)
