"""A machine is lost for good, with its disk: with mirrors the run goes on at the mirrored head, without by `dips
recover`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dips.config import load_run
from dips.ids import VersionId
from dips.master import genesis
from dips.master.ledger import Ledger
from tests.chaos import disks, train_falling
from tests.chaos.certificates import RunCertificates, is_secured
from tests.chaos.deployment import SEEN_S, Deployment
from tests.chaos.wires import Loop
from tests.integration.cluster_harness import ROOT, Process, Run

CONFIG = 78
NEAR = 15  # versions
MIRRORED_S = 60.0  # for a version to lie in every mirror


# ---- with mirrors ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mirrored(tmp_path: Path, loop: Loop) -> Iterator[Deployment]:
    """A run whose master and slaves have mirrors on another disk."""
    with Deployment(tmp_path, loop, mirrors=True) as deployment:
        deployment.start()
        deployment.retired()
        deployment.progress(2, by=deployment.clusters)
        _all_mirrored(deployment)
        yield deployment


def _all_mirrored(deployment: Deployment) -> dict[str, Any]:
    """Wait until the ledger's mirror keeps up, and every slave's works and holds a version of the last few seconds.

    What it holds and what it is to copy next travel by heartbeats: three rounds of this run each.
    """

    def holds(status: dict[str, Any]) -> bool:
        mirrors = [slave["mirror"] for slave in status["slaves"].values() if slave.get("mirror")]
        near = [m for m in mirrors if m["version"] and m["behind_versions"] <= NEAR and not m["failing"]]
        return len(near) == 2 and not status["ledger_mirror"]["red"]

    return deployment.wait_for_status(holds, MIRRORED_S, "mirrors keep up")


def _mirrored(deployment: Deployment, slave: str) -> VersionId:
    """The newest version that lies whole in a slave's mirror."""
    whole = (deployment.directory / "mirror" / "test" / slave).glob("v*@r*/manifest.json")
    return max(VersionId.parse(path.parent.name) for path in whole)


def test_the_machines_of_a_slave_and_of_the_master_are_lost(mirrored: Deployment) -> None:
    """Both directories are gone, at once: both come back from their mirrors, and no cluster notices more than a
    pause; what is undone is what the mirror lagged behind."""
    deployment = mirrored
    before = {name: deployment.process(name).pid for name in deployment.clusters}
    deployment.process("ps1").kill()
    deployment.process("master").kill()
    with deployment.ledger() as ledger:
        rows = {v.version for v in ledger.read_state().versions}
    mirrored = _mirrored(deployment, "ps1")
    assert mirrored in rows
    shutil.rmtree(deployment.directory / "ps1")
    shutil.rmtree(deployment.master_directory)
    deployment.start_master()
    deployment.start_slave("ps1")
    deployment.until((deployment.master_directory / genesis.LEDGER).exists, SEEN_S, "the ledger is restored")
    deployment.progress(3, by=deployment.clusters)
    deployment.check()
    lineage = deployment.lineage()
    assert mirrored in lineage
    lost = [v for v in rows if v not in lineage]
    assert all(v.version > mirrored.version for v in lost), f"{lost} undone, {mirrored} was mirrored"
    assert {name: deployment.process(name).pid for name in deployment.clusters} == before
    assert "restored" in (deployment.directory / "ps1.log").read_text()
    assert "ledger_restored" in (deployment.directory / "master.log").read_text()
    with deployment.ledger() as ledger:
        state = ledger.read_state()
    assert {p.name: p.inc for p in state.clusters} == dict.fromkeys(deployment.clusters, 1), "they were not fenced"


def test_a_directory_removed_under_a_living_slave_is_written_anew(mirrored: Deployment) -> None:
    """It serves from memory, makes the directory again and goes on; nothing is undone, the mirror stays."""
    deployment = mirrored
    since = time.time()
    (deployment.directory / "ps0").rename(deployment.directory / "removed")  # at once: it writes there meanwhile
    shutil.rmtree(deployment.directory / "removed")
    deployment.progress(3, by=deployment.clusters)
    assert "directory_gone" in (deployment.directory / "ps0.log").read_text()
    assert not deployment.marks(deployment.master_timeline, "rolled_back")
    deployment.wait_for_status(lambda s: s["durability"]["head"], SEEN_S, "the head is durable")
    assert not deployment.marks(deployment.master_timeline, "stopped")
    deployment.check()
    assert disks.versions(deployment.directory / "ps0")
    assert time.time() > since


def test_mirrors_that_are_gone_hold_up_nothing(mirrored: Deployment) -> None:
    """Rounds go on, the status is red and says why and how far; when they are back they catch up."""
    deployment = mirrored
    mirror, away = deployment.directory / "mirror", deployment.directory / "away"
    mirror.rename(away)
    deployment.progress(4, by=deployment.clusters)
    status = deployment.wait_for_status(
        lambda s: s["ledger_mirror"]["red"] and all(x["mirror"]["failing"] for x in s["slaves"].values()),
        SEEN_S,
        "the status is red",
    )
    assert "is not there: mount it" in status["ledger_mirror"]["reason"]
    assert all(s["mirror"]["behind_versions"] >= 2 for s in status["slaves"].values())
    assert not [r for r in deployment.skipped() if "mirror" in r]
    away.rename(mirror)
    _all_mirrored(deployment)
    deployment.check()


def test_a_mirror_that_is_not_mounted_is_no_empty_one(mirrored: Deployment) -> None:
    """The status says what is missing, and asks; when it is there the slave restores it without being started again."""
    deployment = mirrored
    mirror, away = deployment.directory / "mirror" / "test" / "ps1", deployment.directory / "away"
    deployment.process("ps1").kill()
    mirror.rename(away)
    held = max(VersionId.parse(path.parent.name) for path in away.glob("v*@r*/manifest.json"))
    shutil.rmtree(deployment.directory / "ps1")
    deployment.start_slave("ps1")
    deployment.wait_for_status(
        lambda s: "ps1 holds no snapshot of it either: is it mounted?" in s["slaves"]["ps1"]["reason"],
        SEEN_S,
        "the status asks for the mirror",
    )
    away.rename(mirror)
    deployment.progress(2, by=deployment.clusters)
    deployment.check()
    assert held in deployment.lineage()


# ---- without ---------------------------------------------------------------------------------------------------------


def _state_of(slave: str, file: str) -> str:
    state: str = json.loads(_dips("status", "--config", file, "--json"))["slaves"][slave]["state"]
    return state


def _dips(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dips.cli", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, f"dips {words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


class FallingRun(Run):
    """One cluster whose loss falls, no mirrors."""

    def __init__(self, directory: Path) -> None:
        tensors = {n: p.detach().numpy() for n, p in train_falling.FallingModel().named_parameters()}
        # No overshoot: each version is nearer than the one before.
        gentle = {"lr": 0.5, "momentum": 0.2, "step": "nesterov"}
        certificates = RunCertificates(directory, "test", ("ps0", "ps1"), ("west",)) if is_secured(False) else None
        super().__init__(
            directory, tensors, shared={"penalty": {"gates": []}, "outer": gentle},
            security=certificates.security if certificates else None,
        )  # fmt: skip

    def go(self) -> Process:
        return self.start_cluster("west", [sys.executable, train_falling.__file__], steps=3)

    def made(self, more: int) -> int:
        """Wait for so many more versions; return how many there are."""
        path = genesis.ledger_path(load_run(self.file))
        with closing(Ledger.open(path, readonly=True)) as ledger:
            at = sum(1 for r in ledger.read_history(1000) if r.version)
            self.until(
                lambda: sum(1 for r in ledger.read_history(1000) if r.version) >= at + more, 90, f"{more} versions"
            )
        return at + more

    def loss(self, to: Path) -> float:
        """Of the exported head."""
        _dips("export", "--config", str(self.file), "--output", str(to))
        tensors: dict[str, torch.Tensor] = load_file(to)
        return train_falling.loss_of(list(tensors.values()))


@pytest.mark.timeout(280)
def test_without_mirrors_a_saved_model_goes_on(tmp_path: Path) -> None:
    """A slave's disk is lost: `dips recover` goes on from an export, while the cluster lives. Then the ledger is lost,
    too: a new one begins with the last export. The loss goes on falling."""
    saved, file = tmp_path / "saved.safetensors", str(tmp_path / "dips.yaml")
    words = ("recover", "--config", file, "--model", str(saved), "--yes")
    lost = ("recover", "--lost-ledger", *words[1:])
    with FallingRun(tmp_path) as run:
        master, (ps0, ps1), west = run.start_master(), run.start_slaves(), run.go()
        run.made(5)
        begun = run.loss(saved)
        run.made(4)
        ps1.kill()
        shutil.rmtree(tmp_path / "ps1")
        told = _dips(*lost, code=CONFIG)
        assert "the master (pid " in told and "slave ps0 (pid " in told and "stop the master and all slaves" in told
        ps1 = run.start_slave("ps1")
        run.until(lambda: _state_of("ps1", file) == "restoring", SEEN_S, "the master knows that ps1 has nothing")
        told = _dips(*words)
        assert "  ps1: " in told and "is the head" in told
        run.made(4)
        assert west.code is None, "the cluster lived through it"
        history = _dips("history", "--config", file, "--json", "--last", "100")
        (made,) = [line for line in map(json.loads, history.splitlines()) if line["recovered"]]
        assert "lost their momentum" in made["recovered"] and saved.name in made["recovered"]
        middle = run.loss(tmp_path / "middle.safetensors")
        assert middle < begun

        master.kill()
        for process in (west, ps0, ps1):
            process.terminate()
        shutil.rmtree(tmp_path / "master")
        shutil.copy(tmp_path / "middle.safetensors", saved)
        master = run.start_master()
        run.until(lambda: "put its newest ledger back" in master.tail(), SEEN_S, "the master says what is missing")
        master.terminate()
        told = _dips(*lost)
        assert "no ledger at" in told and "ps1: " in told and "momentum of v" in told
        run.start_servers()
        run.go()
        run.made(4)
        assert run.loss(tmp_path / "end.safetensors") < middle
