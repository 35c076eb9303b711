"""`dips recover` between hosts that share no disk: a slave is lost with its disk, and nothing mirrored it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks import namespaces
from dips.protocol.manifest import Manifest
from tests.chaos import train_falling
from tests.damage import load_parameters
from tests.integration.test_rebalance import HOSTS, Apart, made_hosts
from tests.typed import type_dips

__all__ = ["made_hosts"]


def sent(run: Apart, host: str, *words: str) -> subprocess.Popen[str]:
    """Call a word of `dips` on a host."""
    command = [*run.hosts[host].command(), sys.executable, "-m", "dips.cli", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_disk_is_made_up_for_from_another_host(
    hosts: dict[str, namespaces.End], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ps1 and its disk are gone. An empty one starts on another host, and `dips recover` on a third has a saved model.
    The master is killed while the transfer opens, and restarted. Then the version after the head has θ of the file, m
    of the disk that is left and 0 for the lost layers, and the cluster, which lived through it, goes on from there.
    """
    tensors = {name: p.detach().numpy() for name, p in train_falling.FallingModel().named_parameters()}
    shared = {
        "stop": {"versions": 5000},
        "outer": {"lr": 0.5, "momentum": 0.2, "step": "nesterov"},
        "penalty": {"gates": []},
    }
    kept = {"keep_every": 1, "keep_most": 5000}  # so that the version of the file is still there to be compared
    with Apart(tmp_path, hosts, tensors, shared=shared, master=kept) as run:
        for host in "abc":
            shutil.copytree(tmp_path / "master" / "initial", tmp_path / host / "initial")
        (tmp_path / "c" / "ps1").mkdir()
        run.start_master()
        ps0, ps1 = run.start_slaves()
        cluster = run.start_cluster("west", [sys.executable, train_falling.__file__], steps=3)
        run.until(lambda: run.head().version >= 2, 240, "versions")
        saved = tmp_path / "saved.safetensors"
        type_dips("export", "--config", str(run.file), "--output", str(saved))
        exported = run.head().version
        run.until(lambda: run.head().version > exported + 5, 240, "versions after the export")

        ps1.kill()
        shutil.rmtree(tmp_path / "b" / "ps1")
        monkeypatch.setitem(HOSTS, "ps1", "c")
        run.write_run_file()
        run.start_slave("ps1")
        master = next(p for p in run.processes if p.name == "master")
        run.until(lambda: "rollback_waits" in master.log.read_text(), 120, "the master says what is lost")
        before = run.head()
        os.kill(ps0.pid, signal.SIGSTOP)  # so that the transfer stays where it is until the master is gone
        words = ("recover", "--config", str(run.host_file("nobody")), "--model", str(saved), "--yes")
        recovering = sent(run, "b", *words)
        run.until(lambda: "seed_opened" in master.log.read_text(), 120, "the transfer opens")
        master.kill()
        os.kill(ps0.pid, signal.SIGCONT)
        run.start_master()
        said, _ = recovering.communicate(timeout=240)
        assert recovering.returncode == 0, said
        run.until(lambda: run.head().version > before.version + 3, 240, "versions after it")
        stopping = sent(run, "head", "stop", "--config", str(run.file))
        said, _ = stopping.communicate(timeout=120)
        assert stopping.returncode == 0, said
        run.wait(cluster, 240)
        with run.ledger() as ledger:
            (row,) = [r for r in ledger.read_history(5000) if r.recovered]
            state = ledger.read_state()

    made, model = row.version, Manifest.from_json(state.row.manifest)
    assert made is not None and made.version == before.version + 1
    assert made.round > before.round + 1, "the try that the master did not survive has a round of its own"
    assert [(c.name, c.inc) for c in state.clusters] == [("west", 1)]
    file = load_file(saved)
    lost = {p.name for layer in dict(state.row.placement)["ps1"] for p in model.layers[layer].parameters}
    found = {name: load_parameters(tmp_path / HOSTS[name] / name / str(made)) for name in ("ps0", "ps1")}
    theirs = load_parameters(tmp_path / "a" / "ps0" / str(before))
    for slave, parameters in found.items():
        for name, tensor in parameters.items():
            part, _, parameter = name.partition(".")
            assert (parameter in lost) == (slave == "ps1")
            expected = file[parameter] if part == "theta" else theirs[name] if slave == "ps0" else np.zeros_like(tensor)
            assert tensor.tobytes() == expected.tobytes(), name
    assert any(tensor.any() for name, tensor in theirs.items() if name.startswith("momentum."))
    assert row.recovered is not None and "lost their momentum" in row.recovered
