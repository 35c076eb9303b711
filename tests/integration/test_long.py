"""Work that lasts five times the constant that guards it, with real processes: nothing is lost by time alone."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.integration import cluster_harness as harness
from tests.integration import train_constant as constant

HERE = Path(__file__).parent
TIMES = 5


def tensors() -> dict[str, np.ndarray]:
    return {n: np.zeros(tuple(p.shape), np.float32) for n, p in constant.ConstantModel().named_parameters()}


@pytest.mark.slow
@pytest.mark.real_commands
@pytest.mark.timeout(120)
def test_a_snapshot_of_five_order_s_loses_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters that push as they please: while every slave's disk is busy their orders are answered.

    They were not: a slave that wrote for two deadlines of an order was lost, and with it the round (4 of 8).
    """
    order_s = 0.8
    monkeypatch.setenv("SLOW_FSYNC_S", str(TIMES * order_s))
    timing = {"order_s": order_s, "compute_s": order_s, "heartbeat_s": 0.3, "window_s": 0.1}
    shared = {"stop": {"versions": 4}, "penalty": {"gates": []}}
    with harness.Run(tmp_path, tensors(), shared=shared, timing=timing) as run:
        run.commands["slave"] = [sys.executable, str(HERE / "slow_disk_slave.py")]
        run.start_master()
        run.start_slaves()
        command = [sys.executable, str(HERE / "train_tiny.py"), "steps", str(tmp_path / "out")]
        clusters = [run.start_cluster(name, command, steps=steps) for name, steps in (("a", 7), ("b", 17))]
        begun = time.monotonic()
        for cluster in clusters:
            run.wait(cluster, 90)
        with run.ledger() as ledger:
            rounds = ledger.read_history(1000)
        assert "slave_lost" not in (run.directory / "master.log").read_text()
    assert time.monotonic() - begun > 4 * TIMES * order_s, "the disk was as slow as was asked for"
    assert [r.kind for r in rounds if r.kind != "applied"] == []
    assert len({fold.push.cluster for r in rounds for fold in r.folds}) == 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_with_overlap_and_steps_of_five_stall_s_every_push_lands(tmp_path: Path) -> None:
    """Granted, moved, committed and pulled at boundaries that are five times the stall apart, and the hang, too."""
    stall_s = 0.4
    timing = {"heartbeat_s": 0.2, "hang_s": stall_s, "least_transfer_s": stall_s, "transfer_s": stall_s}
    shared = {
        "stop": {"versions": 2},
        "outer": {"lr": 1.0, "momentum": 0.0, "step": "nesterov", "clip": {}},
        "penalty": {"gates": []},
    }
    with harness.Run(tmp_path, tensors(), shared=shared, timing=timing, slave={"stall_s": stall_s}) as run:
        run.start_master()
        run.start_slaves()
        path, out = str(HERE / "train_overlap.py"), tmp_path / "found"
        command = [sys.executable, path, str(out), str(TIMES * stall_s), str(2.0**-10)]
        cluster = run.start_cluster("a", command, steps=1, overlap="full", heartbeat_s=0.2, stall_s=stall_s)
        run.wait(cluster, 90)
        marks = [json.loads(line) for line in run.timeline("a").read_text().splitlines()]
    assert [m["outcome"] for m in marks if m["kind"] == "outcome"] == ["accepted"] * 2
    ended = [m for m in marks if m["kind"] in ("push_end", "pull_end")]
    assert len(ended) >= 4 and all(m.get("ok", m.get("installed")) for m in ended), ended
