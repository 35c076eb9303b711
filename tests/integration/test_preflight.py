"""`dips check` against a real master and real slaves: what is well, and how it says what is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from tests.integration import cluster_harness as harness

TENSORS = {"a.weight": np.zeros((64, 32), np.float32), "b.weight": np.ones((16,), np.float32)}


FACTORY = """
import torch

def build(width=32):
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Linear(width, 64, bias=False), torch.nn.LayerNorm(16, bias=False)
    return model

def other():
    return build(33)
"""


def check(directory: Path, content: dict[str, Any], *words: str) -> tuple[int, dict[str, dict[str, str]], str]:
    """Write a cluster file, run the command as a person does; return its exit code, its rows by name, its errors."""
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "dips.cli", "check", "--config", str(path), "--json", "--most-mib", "8", *words]
    environment = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=directory, env=environment)
    rows = json.loads(done.stdout)["rows"]
    return done.returncode, {row["what"].removeprefix(f"{path}: "): row for row in rows}, done.stdout + done.stderr


@pytest.fixture(name="run")
def made_run(tmp_path: Path) -> Any:
    with harness.Run(tmp_path, TENSORS) as run:
        yield run


def cluster(run: Any, **changes: Any) -> dict[str, Any]:
    content = {"shared": run.shared, "cluster": "oslo", "master": run.address, "directory": "oslo", "tls": False}
    return {**content, **changes}


def test_all_is_well_and_what_is_not_is_named(run: Any, tmp_path: Path) -> None:
    """A right cluster gets 0 and a rate for each slave; another model, other options and another run get 78."""
    run.make_ready()
    save_file(TENSORS, tmp_path / "right.safetensors")
    save_file({**TENSORS, "b.weight": np.ones((17,), np.float32)}, tmp_path / "wrong.safetensors")

    code, rows, errors = check(tmp_path, cluster(run), "--model", str(tmp_path / "right.safetensors"))
    assert code == 0, errors
    assert {row["verdict"] for row in rows.values()} == {"ok", "note"}
    assert rows["certificates"]["seen"] == "none: plain text on loopback"
    assert rows["name"]["seen"] == "oslo is new to the run"
    for slave in run.slaves:
        seen = rows[f"slave {slave}"]["seen"]
        trip, there, back = map(float, re.findall(r"([\d.]+) (?:ms|Mbit/s)", seen))
        assert trip < 1000 and there > 50 and back > 50, seen

    code, rows, _ = check(tmp_path, cluster(run), "--model", str(tmp_path / "wrong.safetensors"))
    assert (code, rows["model"]["verdict"]) == (78, "FAIL")
    assert rows["model"]["seen"] == "b.weight: expected shape (16,), got (17,)"

    (tmp_path / "mymodel.py").write_text(FACTORY)
    code, rows, _ = check(tmp_path, cluster(run), "--factory", "mymodel:build")
    assert (code, rows["model"]["seen"]) == (0, "2 parameters, 0.00 M elements, as the run's")
    code, rows, _ = check(tmp_path, cluster(run), "--factory", "mymodel:other")
    assert code == 78 and "a.weight: expected shape (64, 32), got (64, 33)" in rows["model"]["seen"]

    shared = {**run.shared, "outer": {"lr": 0.5}}
    code, rows, _ = check(tmp_path, cluster(run, shared=shared))
    assert (code, rows["shared options"]["seen"]) == (78, "shared.outer.lr: the run has 0.7, this file 0.5")

    code, rows, _ = check(tmp_path, cluster(run, shared={"run": "another"}))
    assert (code, rows["run"]["verdict"]) == (78, "FAIL")

    log = (tmp_path / "master.log").read_text()
    assert "joined" not in log, "a preflight joins nobody"


def test_what_does_not_answer(run: Any, tmp_path: Path) -> None:
    """Without a master, and with a slave that never came or died, the exit code is 69 and the row says who."""
    code, rows, _ = check(tmp_path, cluster(run))
    assert (code, rows["master"]["verdict"]) == (69, "FAIL")

    ready_slave = run.slaves[0]
    run.start_master()
    slave = run.start_slave(ready_slave)
    run.until(
        lambda: '"ready"' in slave.log.read_text() or "register_waits" in slave.log.read_text(), 60, "it is known"
    )
    code, rows, _ = check(tmp_path, cluster(run))
    assert code == 69
    assert "not registered" in rows[f"slave {run.slaves[1]}"]["seen"]

    slave.kill()
    code, rows, _ = check(tmp_path, cluster(run))
    assert (code, rows[f"slave {ready_slave}"]["verdict"]) == (69, "FAIL")


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    """The cluster file itself: 78, and the key is named."""
    wrong = {"shared": {"run": "r"}, "cluster": "a", "master": "10.0.0.1:1", "tls": False}
    code, _, errors = check(tmp_path, wrong)
    assert code == 78 and "master: plain text" in errors


def test_where_ranks_of_other_hosts_find_the_agent(run: Any, tmp_path: Path) -> None:
    """An address of this host is well; one of another host, or a token that is none, is named: 78."""
    run.make_ready()
    code, rows, _ = check(tmp_path, cluster(run, agent="127.0.0.1:0"))
    assert code == 0 and rows["agent's line"]["seen"].startswith("127.0.0.1:a free port (127.0.0.1), token: a new one")
    code, rows, _ = check(tmp_path, cluster(run, agent="192.0.2.1:29410"))
    assert code == 78 and "192.0.2.1 is no address of this host" in rows["agent's line"]["seen"]
    (tmp_path / "token").write_text("short")
    (tmp_path / "token").chmod(0o600)
    code, rows, _ = check(tmp_path, cluster(run, agent="127.0.0.1:0", token=str(tmp_path / "token")))
    assert code == 78 and "at least 16 characters" in rows["agent's line"]["seen"]
