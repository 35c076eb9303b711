"""A run trains a data set to its end: every range once, and what workers read is what one process would."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dips.data import DataSet
from dips.data.build import Plan, build, source
from tests.integration import cluster_harness as harness
from tests.integration import train_ranges as script

HERE = Path(__file__).parent
RANGES = 8


@pytest.mark.timeout(240)
def test_a_data_set_is_trained_to_its_end(tmp_path: Path) -> None:
    """Agent, master, slaves, a DataLoader with two workers: all ranges, in order; what was used up is settled once."""
    np.save(tmp_path / "tokens.npy", np.arange(6000, dtype=np.uint16))
    np.save(tmp_path / "tokens.documents.npy", np.arange(0, 6000, 40))
    digest = build(Plan((source(f"t={tmp_path}/tokens.npy"),), tmp_path / "set", RANGES, 3)).digest
    data = DataSet(tmp_path / "set")
    tensors = {name: p.detach().numpy() for name, p in script.build().named_parameters()}
    shared = {"data": {"ranges": RANGES, "digest": digest}, "penalty": {"rule": "none"}}
    with harness.Run(tmp_path, tensors, shared=shared) as run:
        run.start_master()
        run.start_slaves()
        command = [sys.executable, str(HERE / "train_ranges.py"), str(tmp_path / "set"), str(tmp_path / "seen.json")]
        run.wait(run.start_cluster("west", command, steps=4), 200)
        with run.ledger() as ledger:
            rounds = ledger.history(1000)

    expected = [
        (number, batch[:, 0].tolist())
        for number in range(RANGES)
        for batch in data.batches(number, script.SEQUENCES, script.LENGTH)
    ]
    assert [tuple(one) for one in json.loads((tmp_path / "seen.json").read_text())] == expected
    settled = [number for r in rounds for o in r.outcomes for number in o.ranges]
    assert settled == sorted(set(settled)), "a range twice, or out of order"
    steps = [data.steps(n, script.SEQUENCES, script.LENGTH) for n in range(RANGES)]
    pushed = sum(steps) // 4 * 4  # what came after the last push is carried, and lost with the end of the job
    whole = [n for n in range(RANGES - 1) if sum(steps[: n + 1]) < pushed]  # used up when the next one is asked for
    assert settled == whole
