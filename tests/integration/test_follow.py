"""Followers: each new version arrives whole within seconds of its row, with its name; and nobody notices them.

This file is also a training script of a larger model: `python test_follow.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.numpy import load_file

import dips
import dips.client
from dips.errors import ConfigError
from dips.identity.names import PeerRole
from dips.ids import GENESIS, VersionId
from dips.slave.export import export_snapshot
from tests.enrolled import enroll_all
from tests.integration import cluster_harness as harness
from tests.integration import train_constant as script
from tests.waiting import until

TINY = str(Path(__file__).parent / "train_tiny.py")
NOTE = """
import json, os, shutil, sys
from safetensors import safe_open
with safe_open(os.environ["DIPS_MODEL"], "np") as file:
    version, mode = file.metadata()["version"], os.stat(os.environ["DIPS_MODEL"]).st_mode & 0o777
shutil.copy(os.environ["DIPS_MODEL"], f"{sys.argv[1]}/{version}.safetensors")
with open(f"{sys.argv[1]}/seen", "a") as seen:
    print(json.dumps([os.environ["DIPS_VERSION"], version, mode]), file=seen)
"""


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    named = script.ConstantModel().named_parameters()
    return {name: random.standard_normal(tuple(p.shape)).astype(np.float32) for name, p in named}


@pytest.mark.timeout(180)
def test_a_command_sees_each_version_whole(tmp_path: Path) -> None:
    """`dips follow`: by updates, the file is bit for bit what the disks keep; the run's end ends it."""
    shared = {"penalty": {"gates": []}, "stop": {"versions": 4}, "pull_codec": "int8"}
    (tmp_path / "seen-files").mkdir()
    (tmp_path / "note.py").write_text(NOTE)
    with harness.Run(tmp_path, tensors(), shared=shared, master={"keep_every": 1}) as run:
        start(run)
        command = f"{sys.executable} {tmp_path / 'note.py'} {tmp_path / 'seen-files'}"
        words = [sys.executable, "-m", "dips.cli", "follow", "--master", run.address, "--command", command]
        follower = run._start("follower", words)
        run.until(lambda: (tmp_path / "seen-files" / "seen").exists(), 60, "the first version is seen")
        west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")], steps=50)
        run.wait(west, 90)
        run.wait(follower, 30)
        said = (tmp_path / "follower.log").read_text()
        seen = [json.loads(line) for line in (tmp_path / "seen-files" / "seen").read_text().splitlines()]
        names = [VersionId.parse(version) for version, *_ in seen]
        assert names[0] == GENESIS and names[-1].version == 4 and names == sorted(set(names)) and len(names) > 2
        assert all(named == held and mode == 0o600 for named, held, mode in seen), seen
        assert f"the run has ended with {names[-1]}" in said
        for version in names[1:]:  # the slaves keep no snapshot of v0@r0
            export_snapshot([tmp_path / name for name in run.slaves], version, tmp_path / "disks.safetensors")
            of_disks, followed = (
                load_file(tmp_path / "disks.safetensors"),
                load_file(tmp_path / f"seen-files/{version}.safetensors"),
            )
            assert all(np.array_equal(of_disks[name], followed[name]) for name in of_disks), version
        with run.ledger() as ledger:
            rounds, state, acts = ledger.read_history(), ledger.read_state(), ledger.read_audit()
        assert {o.push.cluster for r in rounds for o in r.outcomes} == {"west"}
        assert {c.name: c.ended for c in state.clusters}["follow.puller"]
        assert [(a.caller, a.action, a.arguments) for a in acts] == [("follow.puller", "pull", "v0@r0")]


def large() -> torch.nn.Module:
    """16 MB, so that a pull is seen on its way."""
    torch.manual_seed(1)
    return torch.nn.Linear(2048, 2048)


def named(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def start(run: harness.Run, of_master: Path | None = None) -> None:
    """Start master and slaves, and wait until they are ready; `of_master`: a run file for the master alone."""
    of_slaves, told = run.file, run.directory / "master.log"
    run.file = of_master or of_slaves
    run.start_master()
    run.file = of_slaves
    run.start_slaves()
    run.until(lambda: told.read_text().count('"slave_ready"') == len(run.slaves), 60, "all slaves have registered")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_follower_that_is_stopped_costs_nobody_anything(tmp_path: Path) -> None:
    """Stopped in the middle of a pull, with no bank for older versions: the run goes on, by updates, without a skipped
    round; when it continues it has the newest version, whole (docs/architecture.md#invariant-12)."""
    shared = {"penalty": {"gates": []}, "stop": {"versions": 1_000}, "pull_codec": "int8"}
    file = tmp_path / "copy" / "model.safetensors"
    slave = {"pinned": 0}
    with harness.Run(tmp_path, named(large()), shared=shared, slave=slave, master={"keep_every": 1}) as run:
        start(run)
        run.start_cluster("west", [sys.executable, str(Path(__file__))], steps=2)
        run.until(lambda: len(run.versions()) >= 2, 90, "two versions")
        words = [sys.executable, "-m", "dips.cli", "follow", "--master", run.address, "--output", str(file)]
        follower = run._start("follower", words)
        aside = file.with_name(f".unfinished-{file.name}")
        run.until(file.exists, 60, "its first version")
        until(aside.exists, follower.tail, 60, pause_s=0.001)  # its next pull has begun
        os.kill(follower.pid, signal.SIGSTOP)
        try:
            before = len(run.versions())
            run.until(lambda: len(run.versions()) >= before + 4, 90, "versions while it stands")
        finally:
            os.kill(follower.pid, signal.SIGCONT)

        def held() -> VersionId:
            with safe_open(file, "np") as opened:
                return VersionId.parse(opened.metadata()["version"])

        run.until(lambda: held().version >= before + 4, 60, "it has a version that was made meanwhile")
        assert follower.terminate() == 0 and not aside.exists()
        assert "stopped" in follower.log.read_text()
        version, followed = held(), load_file(file)
        export_snapshot([tmp_path / name for name in run.slaves], version, tmp_path / "disks.safetensors")
        of_disks = load_file(tmp_path / "disks.safetensors")
        assert all(np.array_equal(of_disks[name], followed[name]) for name in of_disks), version
        assert not run.skipped()


@pytest.mark.timeout(180)
def test_a_model_that_is_another_one_stays_as_it_was(tmp_path: Path) -> None:
    """The names that differ are said; a function may take the tensors instead; nothing waits at the end."""
    with harness.Run(tmp_path, tensors(), slaves=1) as run:
        start(run)
        other = script.ConstantModel()
        other.head = torch.nn.Linear(3, 2)
        before = {name: p.clone() for name, p in other.state_dict().items()}
        with pytest.raises(
            ConfigError, match=r"head.weight: expected the run's shape \(1, 3\), the model's is \(2, 3\)"
        ):
            dips.follow(other, run.address)
        with pytest.raises(ConfigError, match="is not of this model; missing"):
            dips.follow(torch.nn.Linear(2, 2), run.address)
        assert all(torch.equal(p, before[name]) for name, p in other.state_dict().items())
        with pytest.raises(ConfigError, match="plain text is allowed on loopback only"):
            dips.follow(other, "10.0.0.1:7800")

        model, taken = script.ConstantModel().to(torch.bfloat16), dict[str, torch.Tensor]()

        def install(given: Mapping[str, torch.Tensor]) -> None:
            taken.update({name: tensor.clone() for name, tensor in given.items()})

        with dips.follow(model, run.address, name="one") as one, dips.follow(install, run.address, name="two") as two:
            assert one.version == two.version == one.update() == two.update(0.1) == "v0@r0" and not one.finished
        for name, theta in tensors().items():
            assert np.array_equal(taken[name].numpy(), theta)
            assert torch.equal(model.get_parameter(name), torch.from_numpy(theta).to(torch.bfloat16))
        with pytest.raises(ConfigError, match="is closed"):
            one.update()


SLEEPER = """
import os, pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("ended")
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.timeout(120)
def test_its_end_is_the_commands(tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C reach the command, which may tidy up; then the follower leaves the run, with exit code 0."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    with harness.Run(tmp_path, tensors(), slaves=1) as run:
        start(run)
        for number in (signal.SIGTERM, signal.SIGINT):
            told = tmp_path / f"told-{number}"
            command = f"{sys.executable} {tmp_path / 'sleeper.py'} {told}"
            words = [sys.executable, "-m", "dips.cli", "follow", "--master", run.address, "--command", command]
            follower = run._start("follower", words)
            run.until(lambda told=told: told.exists() and told.read_text(), 60, "the command runs")
            pid = int(told.read_text())
            os.kill(follower.pid, number)
            follower.wait_for_end(30)
            assert follower.code == 0 and told.read_text() == "ended"
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        with run.ledger() as ledger:
            (peer,) = ledger.read_state().clusters
        assert peer.name == "follow.puller" and peer.inc == 2 and peer.ended


@pytest.mark.timeout(240)
def test_with_certificates_a_puller_pulls_and_so_does_on_version(tmp_path: Path) -> None:
    """Over encrypted lanes, by the role `puller`; another role's certificate is refused before anything is asked."""
    names = [("master", PeerRole.MASTER), ("ps0", PeerRole.SLAVE), ("west", PeerRole.CLUSTER)]
    pullers = [("serve", PeerRole.PULLER), ("on-version", PeerRole.PULLER), ("eve", PeerRole.VIEWER)]
    security, certs = enroll_all(tmp_path / "certs", "test", [*names, *pullers]), tmp_path / "certs"
    shared = {"penalty": {"gates": []}, "stop": {"versions": 2}}
    with harness.Run(tmp_path, tensors(), shared=shared, slaves=1, security=security) as run:
        content = yaml.safe_load(run.file.read_text())
        content["slaves"][0]["directory"] = content["master"]["directory"]  # as in pods, each with a volume of its own
        command = [sys.executable, "-c", "import os; os.stat(os.environ['DIPS_MODEL'])"]
        content["master"] |= {"keep_every": 1, "on_version": {"every": 1, "command": command}}
        of_master = run.file.with_name("master.yaml")
        of_master.write_text(yaml.safe_dump(content))
        start(run, of_master)
        model = script.ConstantModel()
        with dips.follow(model, run.address, certs / "serve.puller.crt") as follower:
            assert follower.version == "v0@r0"
            run.wait(run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")], steps=20), 90)
            while not follower.finished:
                version = follower.update(60)
            assert version == follower.update() and version.startswith("v2@")
        with pytest.raises(ConfigError, match="expected a certificate of the role operator or puller"):
            dips.follow(model, run.address, certs / "eve.viewer.crt")

        def results() -> list[bool]:
            with run.ledger() as ledger:
                return [r.result.ok for r in ledger.read_history() if r.result is not None]

        run.until(lambda: len(results()) == 2, 90, "both versions are looked at")
        assert results() == [True, True]
        with run.ledger() as ledger:
            acts = [(a.caller, a.action) for a in ledger.read_audit()]
        assert acts.count(("serve.puller", "pull")) == 1 and acts.count(("on-version.puller", "pull")) == 2
    export_snapshot([tmp_path / "ps0"], VersionId.parse(version), tmp_path / "disks.safetensors")
    for name, theta in load_file(tmp_path / "disks.safetensors").items():
        assert np.array_equal(model.get_parameter(name).detach().numpy(), theta)


def train_large() -> None:
    model = large()
    with dips.client.OuterLoop(model) as outer:
        while not outer.finished:
            with torch.no_grad():
                model.weight.add_(1e-3)
            time.sleep(0.1)
            outer.step(tokens=8)


if __name__ == "__main__":
    train_large()
