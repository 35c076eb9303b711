"""The README's steps: `dips new --bare`, two lines edited, a run of five rounds, its curve and its model."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

import dips
from tests.integration import train_constant as script
from tests.integration.cluster_harness import Process, daemon, free_port
from tests.integration.test_up import edit
from tests.typed import type_dips
from tests.waiting import until

TINY = str(Path(__file__).parent / "train_tiny.py")
ROUNDS = 5
FACTORY = "tests.integration.train_constant:ConstantModel"


@pytest.mark.timeout(120)
def test_the_first_run_of_a_new_user(tmp_path: Path) -> None:
    """Every file is right as it was written but for two names, what ends the run early, and the test's own port."""
    address = f"127.0.0.1:{free_port()}"
    tmp_path = tmp_path / "first-run"
    run_file, cluster_file = tmp_path / "dips.yaml", tmp_path / "cluster.yaml"
    type_dips("new", str(tmp_path), "--bare", "--listen", address)
    edit(tmp_path / "shared.yaml", ("versions: 0 ", f"versions: {ROUNDS} "))
    edit(cluster_file, ("cluster: my-cluster ", "cluster: berlin "), ("aligned: 64 ", "aligned: 1 "))
    type_dips("init", "--config", str(run_file), "--factory", FACTORY, "--seed", "1")

    commands = {
        "master": [*daemon("master"), "--config", str(run_file)],
        **{name: [*daemon("slave"), "--config", str(run_file), "--name", name] for name in ("slave-0", "slave-1")},
        "berlin": [*daemon("client"), "--config", str(cluster_file), "--", sys.executable, TINY, "steps",
                   str(tmp_path / "out")],
    }  # fmt: skip
    processes = [Process(name, command, tmp_path / f"{name}.log") for name, command in commands.items()]
    try:
        until(lambda: processes[-1].code is not None, lambda: "\n".join(p.tail() for p in processes), 60)
        assert processes[-1].code == 0, "\n".join(process.tail() for process in processes)
    finally:
        for process in reversed(processes):
            process.terminate()

    type_dips("plot", "--config", str(run_file), "--output", str(tmp_path / "plots"))
    with (tmp_path / "plots" / "loss.csv").open(newline="") as file:
        assert [row["version"] for row in csv.DictReader(file)] == [f"v{n}@r{n}" for n in range(1, ROUNDS + 1)]
    type_dips("export", "--config", str(run_file), "--output", str(tmp_path / "model.safetensors"))
    assert dips.load(script.ConstantModel(), tmp_path / "model.safetensors") == f"v{ROUNDS}@r{ROUNDS}"
