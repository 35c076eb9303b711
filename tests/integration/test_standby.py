"""Two masters behind one name, each on a machine of its own: clusters and slaves find the one that serves.

Every process has a network namespace, and the name leads to both masters' addresses by a hosts file in a mount
namespace; needs root. Nothing stands between the processes: what breaks is what breaks with a machine that dies, falls
silent, or is cut off.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from shutil import copytree, move, rmtree

import numpy as np
import pytest
import yaml

from dips.identity.names import MASTER_NAME, PeerRole
from dips.ids import VersionId
from dips.master import genesis
from dips.master.ledger import Ledger
from dips.view.points import RoundHistory
from tests.chaos import predict
from tests.chaos.train_chaos import SHAPES, START, H
from tests.enrolled import enroll_all
from tests.integration.cluster_harness import ROOT, Process, Run, free_port
from tests.integration.machines import BRIDGES, Machines, missing
from tests.integration.test_mistakes import CLI

SCRIPT = str(ROOT / "tests" / "chaos" / "train_chaos.py")
NAME = "masters"
MASTERS, SLAVE, OPERATOR = ("one", "two"), "ps0", "operator"
CLUSTERS = {"west": 24, "east": 64, "north": 40, "south": 8}  # tokens of a step
ADDRESSES = {name: f"10.21.0.{n}" for n, name in enumerate((*MASTERS, SLAVE, *CLUSTERS), 1)}
HOSTS = "".join(f"{ADDRESSES[name]} {NAME}\n" for name in MASTERS)
IN_SPACE = 'mount --bind "$0" /etc/hosts && exec "$@"'
STALE = 75
SERVES_S = 20.0  # from the loss of a master until the other one serves
TRAIN_S = 10.0  # from then until every cluster is in a new version
SHARED = {
    "outer": {"lr": predict.LR, "momentum": predict.MOMENTUM, "step": "nesterov", "clip": {"norm": predict.CLIP}},
    "penalty": {"gates": []}, "heartbeat_s": 2.0,  # as by default: a lease lasts 10 s
}  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_commands,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=f"NO NAMESPACES: {missing()}"),
]


class TwoMasters(Run):
    """A run whose slave and four clusters dial a name of two masters; each process is on a machine of its own."""

    def __init__(self, directory: Path, machines: Machines) -> None:
        self.machines, self.port = machines, free_port()
        (directory / "store").mkdir()
        (directory / "hosts").write_text(HOSTS)
        peers = [(MASTER_NAME, PeerRole.MASTER), (SLAVE, PeerRole.SLAVE), (OPERATOR, PeerRole.OPERATOR)]
        peers += [(name, PeerRole.CLUSTER) for name in CLUSTERS]
        security = enroll_all(directory / "certs", "test", peers)
        tensors = {name: np.full(shape, START, np.float32) for name, shape in SHAPES.items()}
        slave = {"listen": f"{ADDRESSES[SLAVE]}:0", "initial_model": "initial"}
        super().__init__(
            directory, tensors, slaves=1, slave=slave, master={"mirror": "store"}, shared=SHARED, security=security
        )
        self.address = f"{NAME}:{self.port}"
        self.write_run_file()
        copytree(directory / "master" / genesis.INITIAL, directory / "initial")
        move(directory / "master", self.of("one"))
        for name in MASTERS:
            self.reach_store(name)

    def of(self, master: str) -> Path:
        """The directory of a master."""
        return self.directory / f"master-{master}"

    def way(self, master: str) -> Path:
        """The store, as a master's machine reaches it."""
        return self.directory / f"store-of-{master}"

    def reach_store(self, master: str) -> None:
        self.way(master).symlink_to(self.directory / "store")

    def start_standby(self, name: str) -> Process:
        """Start a master that waits, unless its ledger is the newest."""
        file = yaml.safe_load(self.file.read_text())
        listen, directory = f"{ADDRESSES[name]}:{self.port}", str(self.of(name))
        file["master"] |= {"listen": listen, "directory": directory, "mirror": str(self.way(name))}
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(file))
        return self._start(name, [*self.commands["master"], "--config", str(path), "--standby"])

    def start_all(self) -> dict[str, Process]:
        """Start a master, the slave and all clusters, then the other master; return both when that one is ready."""
        masters = {"one": self.start_standby("one")}
        self.start_slaves()
        for name, tokens in CLUSTERS.items():
            words = [sys.executable, SCRIPT, name, str(self.directory / f"{name}.out"), str(tokens), "0.1"]
            self.start_cluster(name, words, steps=H, max_restarts=1000)
        self.until(lambda: self.trained_since("one", 0) == set(CLUSTERS), 120, "all clusters are in a version")
        masters["two"] = self.start_standby("two")
        self.wait_for_standby()
        return masters

    def wait_for_standby(self) -> None:
        self.until(
            lambda: ") ready" in self.status().partition("standby: ")[2], 60, "status names a standby that is ready"
        )

    def status(self) -> str:
        """What `dips status` says by the name; nothing if nobody answers."""
        credentials = str(self.directory / "certs" / f"{OPERATOR}.operator.crt")
        words = self._on(SLAVE, [*CLI, "status", "--master", self.address, "--credentials", credentials])
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
        return done.stdout if done.returncode == 0 else ""

    def rounds(self, master: str) -> list[RoundHistory]:
        with closing(Ledger.open(self.of(master) / genesis.LEDGER, readonly=True)) as ledger:
            return ledger.read_history(100_000)

    def trained_since(self, master: str, round_number: int) -> set[str]:
        """The clusters that are in a version of a later round."""
        new = [r for r in self.rounds(master) if r.round > round_number and r.version is not None]
        return {fold.push.cluster for r in new for fold in r.folds}

    def check(self, master: str) -> None:
        """Every version that a cluster ever installed is in this ledger with the reference's number; no push counts
        twice."""
        seen = {name: self._seen(name) for name in CLUSTERS}  # first: then every row is there
        with closing(Ledger.open(self.of(master) / genesis.LEDGER, readonly=True)) as ledger:
            lineage, rounds = [row.version for row in ledger.read_state().versions], ledger.read_history(100_000)
        predict.check_lineage(rounds, lineage)
        predict.check_once(rounds, lineage)
        predicted = predict.predict(rounds)
        for name, numbers in seen.items():
            assert len(numbers) > 1
            assert {VersionId.parse(version) for version, _ in numbers} <= set(lineage), name
            predict.check_numbers(numbers, predicted, name)

    def _seen(self, cluster: str) -> list[tuple[str, float]]:
        lines = (self.directory / f"{cluster}.seen").read_text().splitlines()
        return [(version, number) for version, number in map(json.loads, lines)]

    def _start(self, name: str, command: Sequence[str]) -> Process:
        return super()._start(name, self._on(name, command))

    def _on(self, machine: str, command: Sequence[str]) -> list[str]:
        """A command on a machine, for which the name leads to both masters."""
        space = ["unshare", "--mount", "bash", "-c", IN_SPACE, str(self.directory / "hosts")]
        return [*self.machines.words(machine), *space, *command]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TwoMasters]:
    with Machines(tmp_path, ADDRESSES) as machines, TwoMasters(tmp_path, machines) as run:
        yield run


def is_serving(master: Process) -> bool:
    return '"serving"' in master.log.read_text()


@pytest.mark.parametrize("lost", ["its process and its directory", "its machine", "it says nothing any more"])
def test_the_name_leads_to_the_master_that_serves(run: TwoMasters, lost: str) -> None:
    """The first is lost: the second serves within SERVES_S, and every cluster is in its versions within TRAIN_S more,
    under the name it has. A machine that is lost sends nothing any more, not even that its connections are closed.
    """
    masters = run.start_all()
    if lost == "its machine":
        run.machines.plug(["one"], None)
    since = time.monotonic()
    if lost == "it says nothing any more":
        os.kill(masters["one"].pid, signal.SIGSTOP)
    else:
        masters["one"].kill()
        rmtree(run.of("one"))
    run.until(lambda: is_serving(masters["two"]), SERVES_S, "the second one serves")
    served_s, last = time.monotonic() - since, max(r.round for r in run.rounds("two"))
    try:
        run.until(lambda: run.trained_since("two", last) == set(CLUSTERS), 120, "all are in new versions")
    finally:
        print(f"{lost}: served after {served_s:.1f} s, all trained after {time.monotonic() - since:.1f} s")
    assert time.monotonic() - since < served_s + TRAIN_S
    if masters["one"].code is None:
        os.kill(masters["one"].pid, signal.SIGCONT)
        run.until(lambda: masters["one"].code == STALE, 30, "the first one ends: another serves")
    run.check("two")
    assert "head v" in run.status(), "and people ask by the name"


@pytest.mark.parametrize("store", MASTERS)
def test_masters_that_are_parted_do_not_both_serve(run: TwoMasters, store: str) -> None:
    """Both are alive, each with two clusters, and the store is with one of them: that one serves, with the slave.

    The other does not, also when the machines reach each other again, and what all clusters have is the reference's.
    """
    masters = run.start_all()
    here, there = {"one": ["west", "east"], "two": ["north", "south"]}, {"one": "two", "two": "one"}
    lost = there[store]
    run.way(lost).unlink()
    run.machines.plug([lost, *here[lost]], BRIDGES[1])
    since = time.monotonic()
    if store == "two":
        run.until(lambda: masters["one"].code == STALE, SERVES_S, "the first one, without the store, ends")
        assert not is_serving(masters["two"])
        run.until(lambda: is_serving(masters["two"]), SERVES_S - (time.monotonic() - since), "the second one serves")
    last = max(r.round for r in run.rounds(store))
    run.until(lambda: run.trained_since(store, last) == set(here[store]), 60, "those with the store train on")
    run.until(lambda: time.monotonic() - since > 2 * SERVES_S, 60, "a second one had served by now")
    run.reach_store(lost)
    run.machines.plug([lost, *here[lost]], BRIDGES[0])
    if masters[lost].code is not None:
        masters[lost] = run.start_standby(lost)
    last = max(r.round for r in run.rounds(store))
    run.until(lambda: run.trained_since(store, last) == set(CLUSTERS), 60, "all train on")
    run.wait_for_standby()
    assert is_serving(masters[store]) and masters[lost].log.read_text().count('"serving"') == (lost == "one")
    run.check(store)
