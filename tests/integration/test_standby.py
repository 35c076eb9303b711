"""Two masters behind one name: clusters and slaves find the one that serves by themselves, and nothing is lost.

The name leads to both addresses by a hosts file of their own, in a mount namespace; needs root. Nothing stands between
the processes: what breaks is what breaks with a machine that dies, or that says nothing any more.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from dips.ids import VersionId
from dips.master import genesis
from dips.master.ledger import Ledger
from dips.telemetry import timeline
from dips.view.points import RoundHistory
from tests.integration.cluster_harness import ROOT, Process, Run
from tests.integration.test_client_agent import tensors
from tests.integration.test_mistakes import CLI

TINY = str(Path(__file__).parent / "train_tiny.py")
NAME, FIRST, SECOND = "localhost", "127.0.0.1", "127.0.0.2"  # a name that needs no certificates
HOSTS = f"{FIRST} {NAME}\n{SECOND} {NAME}\n"
IN_SPACE = 'mount --bind "$0" /etc/hosts && exec "$@"'
SERVES_S = 20.0
FOUND_S = 60.0  # a connection to a machine that says nothing is given up after 15 s; then it is dialled anew
CLUSTERS = ("west", "east")
SHARED = {"penalty": {"gates": []}, "heartbeat_s": 2.0}  # as by default: a lease lasts 10 s


def lacking() -> str:
    """What this machine lacks, or nothing."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "only root may make a mount namespace, with `unshare`"
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return probe.stderr.strip()


pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_commands,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(lacking()), reason=f"one name for two addresses: {lacking()}"),
]


class NamedRun(Run):
    """A run whose slaves and clusters dial a name; its masters listen at one address each, on one port."""

    def __init__(self, directory: Path) -> None:
        (directory / "mirror").mkdir()
        (directory / "hosts").write_text(HOSTS)
        super().__init__(directory, tensors(), slaves=1, master={"mirror": "mirror"}, shared=SHARED)
        self.port = self.address.rpartition(":")[2]
        self.address = f"{NAME}:{self.port}"
        self.write_run_file()

    def _run_file(self, timing):  # type: ignore[no-untyped-def]
        file = super()._run_file(timing)
        for slave in file["slaves"]:
            slave["initial_model"] = str(self.directory / "initial")
        return file

    def in_space(self, *words: str) -> list[str]:
        """A command for which the name leads to both."""
        return ["unshare", "--mount", "bash", "-c", IN_SPACE, str(self.directory / "hosts"), *words]

    def _start(self, name: str, command: Sequence[str]) -> Process:
        return super()._start(name, self.in_space(*command))

    def start_standby(self, name: str, host: str) -> Process:
        """Start a master on a machine of its own."""
        file = yaml.safe_load(self.file.read_text())
        file["master"] |= {"listen": f"{host}:{self.port}", "directory": str(self.directory / name)}
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(file))
        return self._start(name, [*self.commands["master"], "--config", str(path), "--standby"])

    def status(self) -> str:
        """What `dips status` says by the name; nothing if nobody answers."""
        words = self.in_space(*CLI, "status", "--master", self.address)
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
        return done.stdout if done.returncode == 0 else ""

    def rounds(self, name: str) -> list[RoundHistory]:
        with closing(Ledger.open(self.directory / name / genesis.LEDGER, readonly=True)) as ledger:
            return [r for r in ledger.read_history(100_000) if r.version is not None]

    def installed(self, cluster: str) -> set[VersionId]:
        """The versions that a cluster has pulled."""
        marks = timeline.read_marks(self.timeline(cluster))
        return {VersionId.parse(str(m["version"])) for m in marks if m["kind"] == "pull_end"}


@pytest.mark.parametrize("lost", ["its process and its directory", "it says nothing any more"])
def test_the_name_leads_to_the_master_that_serves(tmp_path: Path, lost: str) -> None:
    """The machine of the first is lost: the second serves within SERVES_S; whatever a cluster had pulled is in its
    ledger, no push is in two versions, and both clusters train on under the name they have."""
    with NamedRun(tmp_path) as run:
        shutil.move(tmp_path / "master", tmp_path / "one")
        shutil.copytree(tmp_path / "one" / "initial", tmp_path / "initial")
        first = run.start_standby("one", FIRST)
        run.start_slaves()
        for name in CLUSTERS:
            run.start_cluster(name, [sys.executable, TINY, "steps", str(tmp_path / f"{name}.out")], steps=5)
        run.until(lambda: len(run.rounds("one")) >= 2, 120, "two versions")
        second = run.start_standby("two", SECOND)
        run.until(
            lambda: ") ready" in run.status().partition("standby: ")[2], 60, "status names a standby that is ready"
        )

        pulled = {name: run.installed(name) for name in CLUSTERS}
        if lost == "it says nothing any more":
            os.kill(first.pid, signal.SIGSTOP)
        else:
            first.kill()
            shutil.rmtree(tmp_path / "one")
        since = time.monotonic()
        run.until(lambda: '"serving"' in second.log.read_text(), SERVES_S, "the second one serves")
        print(f"served after {time.monotonic() - since:.1f} s")
        before = len(run.rounds("two"))

        def both_train() -> bool:
            return all(
                name in {f.push.cluster for r in run.rounds("two")[before:] for f in r.folds} for name in CLUSTERS
            )

        run.until(both_train, FOUND_S, "both clusters are in new versions")
        print(f"both trained after {time.monotonic() - since:.1f} s")
        if first.code is None:
            os.kill(first.pid, signal.SIGCONT)
            run.until(lambda: first.code == 75, 30, "the first one ends: another serves")
        rounds = run.rounds("two")
        versions, pushes = {r.version for r in rounds}, [f.push for r in rounds for f in r.folds]
        assert len(pushes) == len(set(pushes))
        for name, had in pulled.items():
            assert {v for v in had if v.version} <= versions, name
        assert "head v" in run.status(), "and people ask by the name"
