"""A process dies while the last data range is trained: each sequence still counts once, and the run is finished."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dips.data import DataSet
from dips.data.build import BuildPlan, build_dataset, parse_source
from tests.integration import cluster_harness as harness
from tests.integration import train_counts as script

SCRIPT = str(Path(__file__).parent / "train_counts.py")
H = 2  # inner steps: 8 of the range's 9 sequences
EXACT = {
    "outer": {"lr": 1.0, "momentum": 0.0, "clip": {"norm": 1e9}},
    "penalty": {"gates": []},
}  # θ′ is what was pushed


def make_data(directory: Path) -> DataSet:
    """Ranges of 9 sequences, whose first tokens are all different."""
    np.save(directory / "t.npy", np.arange(script.TOKENS, dtype=np.uint16))
    np.save(directory / "t.documents.npy", np.arange(0, script.TOKENS, 16))
    plan = BuildPlan((parse_source(f"t={directory}/t.npy"),), directory / "set", script.RANGES, 3)
    build_dataset(plan)
    return DataSet(directory / "set")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("victim", "pause_at"),
    [
        pytest.param("west", 7, id="the cluster, a part of the range in a push that counts"),
        pytest.param("trainer", 3, id="the trainer, before any push of the range", marks=pytest.mark.slow),
        pytest.param("west", 9, id="the cluster, before the very last push", marks=pytest.mark.slow),
        pytest.param("master", 7, id="the master", marks=pytest.mark.slow),
        pytest.param("ps0", 7, id="a slave", marks=pytest.mark.slow),
    ],
)
def test_each_sequence_counts_once(tmp_path: Path, victim: str, pause_at: int) -> None:
    """θ counts what is trained: 1 for each sequence of the data, and the tokens are those of the data."""
    data, out = make_data(tmp_path), tmp_path / "out.json"
    tensors = {"counts": np.zeros(script.TOKENS, np.float32)}
    shared = {"data": {"ranges": script.RANGES, "digest": data.digest}, **EXACT}
    command = [sys.executable, SCRIPT, str(tmp_path / "set"), str(out), str(pause_at)]
    with harness.Run(tmp_path, tensors, shared=shared, slaves=1) as run:

        def start_cluster() -> harness.Process:
            return run.start_cluster("west", command, steps=H, max_restarts=1)

        starts = {"master": run.start_master, "ps0": lambda: run.start_slave("ps0"), "west": start_cluster}
        processes = {name: start() for name, start in starts.items()}
        run.until(out.with_suffix(".paused").exists, 60, "the last range is trained")
        if victim == "trainer":
            out.with_suffix(".crash").touch()
        else:
            processes[victim].kill()
            processes[victim] = starts[victim]()
        out.with_suffix(".go").touch()
        run.wait(processes["west"], 90)
        with run.ledger() as ledger:
            rounds, state = ledger.read_history(1000), ledger.read_state()
    firsts = [
        data.read_sequences(number, script.LENGTH, np.arange(data.sequences(number, script.LENGTH)))[:, 0]
        for number in range(script.RANGES)
    ]
    expected = np.zeros(script.TOKENS)
    expected[np.concatenate(firsts)] = 1
    assert json.loads(out.read_text()) == expected.tolist()
    assert state.finished is not None and state.begun == () and [*state.settled] == [*range(script.RANGES)]
    assert sum(fold.tokens for r in rounds for fold in r.folds) == expected.sum() * script.LENGTH
