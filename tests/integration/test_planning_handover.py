"""What `dips plan cluster --for` writes is played by the frameworks themselves."""

from __future__ import annotations

import pytest

from benchmarks.planning_handover import play_csv, read_layout

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize(("speeds", "batch"), [((100, 50), 8), ((100, 60, 30), 6)])
def test_torchs_runtime_plays_the_csv(speeds: tuple[float, ...], batch: int) -> None:
    """Uneven layers, F, I and W apart where the schedule has them: gradients of one process."""
    worst, layers = play_csv(speeds, batch)
    assert len(set(layers)) > 1
    assert worst < 1e-6


@pytest.mark.filterwarnings("ignore")  # Megatron-core warns of all that is not installed
@pytest.mark.parametrize(("speeds", "batch"), [((100, 50), 8), ((100, 60, 30), 6)])
def test_megatron_reads_the_layout(speeds: tuple[float, ...], batch: int) -> None:
    """The same blocks for each stage as in the plan."""
    planned, read = read_layout(speeds, batch)
    assert planned == read
    assert sum(read) == 6
