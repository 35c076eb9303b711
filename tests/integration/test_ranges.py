"""A run trains a data set to its end: every range once, and what workers read is what one process would."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dips.data import DataSet
from dips.data.build import BuildPlan, build_dataset, parse_source
from tests.integration import cluster_harness as harness
from tests.integration import train_ranges as script
from tests.integration.test_client_agent import TINY
from tests.integration.train_constant import tensors

HERE = Path(__file__).parent
RANGES = 8


@pytest.mark.timeout(240)
@pytest.mark.parametrize("rest", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_data_set_is_trained_to_its_end(tmp_path: Path, rest: bool) -> None:
    """Agent, master, slaves, a DataLoader with two workers: all ranges, in order; each is settled once, the run ends.

    rest  whether inner steps are left after the last push that the pace asked for
    """
    np.save(tmp_path / "tokens.npy", np.arange(2400, dtype=np.uint16))
    np.save(tmp_path / "tokens.documents.npy", np.arange(0, 2400, 40))
    digest = build_dataset(BuildPlan((parse_source(f"t={tmp_path}/tokens.npy"),), tmp_path / "set", RANGES, 3)).digest
    data = DataSet(tmp_path / "set")
    sequences = sum(data.sequences(n, script.LENGTH) for n in range(RANGES))
    taken = -(-sequences // script.SEQUENCES)
    steps = next(h for h in range(4, taken + 1) if bool(taken % h) is rest)
    tensors = {name: p.detach().numpy() for name, p in script.build().named_parameters()}
    outer = {"clip": {"norm": 1.0}}  # numbers of tokens, as they are, make it diverge without
    shared = {"data": {"ranges": RANGES, "digest": digest}, "penalty": {"gates": []}, "outer": outer}
    with harness.Run(tmp_path, tensors, shared=shared, slaves=1) as run:
        run.start_servers()
        command = [sys.executable, str(HERE / "train_ranges.py"), str(tmp_path / "set"), str(tmp_path / "seen.json")]
        run.wait(run.start_cluster("west", command, steps=steps), 200)
        with run.ledger() as ledger:
            rounds, finished = ledger.read_history(1000), ledger.read_state().finished

    orders = (np.arange(data.sequences(number, script.LENGTH)) for number in range(RANGES))
    expected = [data.read_sequences(n, script.LENGTH, order)[:, 0].tolist() for n, order in enumerate(orders)]
    assert json.loads((tmp_path / "seen.json").read_text()) == [first for one in expected for first in one]
    settled = [number for r in rounds for o in r.outcomes for number in o.ranges]
    assert settled == list(range(RANGES)), "each once, in order"
    assert finished == [r.version for r in rounds if r.version is not None][-1]
    earned = sum(fold.tokens for r in rounds for fold in r.folds)
    assert earned == sequences * script.LENGTH, "each sequence once"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranges", "steps", "pace", "clusters"),
    [
        pytest.param(2, 3, 3, 1, id="a range is H steps"),
        pytest.param(2, 3, 2, 1, id="H + 1"),
        pytest.param(2, 3, 4, 1, id="H - 1"),
        pytest.param(1, 3, 100, 1, id="one range, less than H"),
        pytest.param(2, 2, 2, 3, id="more clusters than ranges"),
    ],
)
def test_every_range_is_settled_once(tmp_path: Path, ranges: int, steps: int, pace: int, clusters: int) -> None:
    """However ranges and H fit together: each once, the run is finished, and its tokens are those of the data."""
    shared = {"data": {"ranges": ranges}, "penalty": {"gates": []}}
    with harness.Run(tmp_path, tensors(), shared=shared, slaves=1) as run:
        run.start_servers()
        started = []
        for i in range(clusters):
            command = [sys.executable, TINY, f"ranges:{steps}", str(tmp_path / f"{i}.out")]
            started.append(run.start_cluster(f"c{i}", command, steps=pace))
        for cluster in started:
            run.wait(cluster, 60)
        with run.ledger() as ledger:
            rounds, finished = ledger.read_history(1000), ledger.read_state().finished
    settled = [number for r in rounds for o in r.outcomes for number in o.ranges]
    assert sorted(settled) == list(range(ranges)) and finished is not None
    assert sum(fold.tokens for r in rounds for fold in r.folds) == ranges * steps * 8
