"""Two masters on one mirror: one is lost, cut off or stopped, the other serves; no version is lost, none counts twice.

Each master is a machine: a directory, an address, and a way to the mirror that can be taken away. Lines lead to the one
that serves, as a name with both addresses does (tests/integration/test_standby.py has such a name).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from dips.ids import VersionId
from dips.telemetry import timeline
from tests.chaos.deployment import SEEN_S, Deployment, address
from tests.chaos.wires import Loop
from tests.integration.cluster_harness import Process, daemon

STALE = 75
SERVES_S = 20.0  # from the loss of a master until the other one serves
KILLS = int(os.environ.get("DIPS_STANDBY_KILLS", "3"))


class Pair:
    """A deployment whose master runs on either of two machines, `a` and `b`."""

    def __init__(self, directory: Path, loop: Loop) -> None:
        self.deployment = Deployment(directory, loop, mirrors=True)
        self.directory, self.serves, self.started = directory, "a", 0
        self.files = dict[str, Path]()
        self.processes = dict[str, Process]()
        self.addresses = {"a": self.deployment.address, "b": address()}
        shutil.move(self.deployment.master_directory, self.of("a"))
        for name, listen in self.addresses.items():
            self.connect(name)
            file = yaml.safe_load(self.deployment.file.read_text())
            file["master"] |= {"directory": str(self.of(name)), "listen": listen, "mirror": str(self.way(name))}
            for slave in file["slaves"]:
                slave["initial_model"] = str(self.of("a") / "initial")
            self.files[name] = directory / f"{name}.yaml"
            self.files[name].write_text(yaml.safe_dump(file))
        shutil.copy(self.files["a"], self.deployment.file)
        self.deployment.master_directory = self.of("a")

    def of(self, name: str) -> Path:
        return self.directory / f"machine-{name}"

    def way(self, name: str) -> Path:
        """The mirror, as this machine reaches it."""
        return self.directory / f"mirror-of-{name}"

    def newest_told(self) -> VersionId:
        """The newest version that the mirror has for certain: the ledger's newest row may be on its way there, and is
        told to nobody before.
        """
        return self.deployment.lineage()[-2]

    def connect(self, name: str) -> None:
        self.way(name).symlink_to(self.directory / "mirror")

    def cut_off(self, name: str) -> None:
        """Take the mirror away from one machine."""
        self.way(name).unlink()

    def start(self, name: str) -> Process:
        """Start a master that waits, unless its ledger is the newest."""
        self.started += 1
        words = [*daemon("master"), "--config", str(self.files[name]), "--standby"]
        process = self.processes[name] = self.deployment._start(f"master-{name}-{self.started}", words)
        return process

    def wait_until_claimable(self) -> None:
        """Wait until the master that serves lets its standby take over."""
        self.deployment.wait_for_status(
            lambda s: s["lease"]["claimable"] and any(x["ready"] for x in s["lease"]["standbys"]), SEEN_S,
            "a standby is ready",
        )  # fmt: skip

    def is_serving(self, name: str) -> bool:
        return '"serving"' in self.processes[name].log.read_text()

    def lead_to(self, name: str) -> None:
        """Lead everybody to this master."""
        self.serves = name
        self.deployment.address, self.deployment.master_directory = self.addresses[name], self.of(name)
        for line in self.deployment.to_master.values():
            line.calls.retarget(self.addresses[name])
            line.wire.cut()

    def wait_for_takeover(self, name: str, within_s: float = SERVES_S) -> float:
        """Wait until this standby serves, and lead everybody to it; return how long that took, in seconds."""
        since = time.monotonic()
        self.deployment.until(lambda: self.is_serving(name), within_s, f"{name} serves")
        took_s = time.monotonic() - since
        self.lead_to(name)
        return took_s

    def lose(self, name: str) -> None:
        """The machine is gone: its process and its directory."""
        self.processes[name].kill()
        shutil.rmtree(self.of(name))

    def count_unreported(self) -> None:
        """Note what ended with incarnations whose next one is of a restored ledger, which knows less of them: as tokens
        that a cluster may not have told. It happens where cores are so busy that leases end.
        """
        untold = self.deployment._untold
        for name in self.deployment.clusters:
            marks = timeline.read_marks(self.deployment.timeline(name))
            lives = [m for m in marks if m["kind"] in ("joined", "incarnation_ended")]
            for ended, joined in pairwise(lives):
                kinds = ended["kind"], joined["kind"]
                if kinds == ("incarnation_ended", "joined") and joined["inc"] > ended["inc"] + 1:
                    untold[name] = untold.get(name, 0) + ended["tokens_lost"]

    @property
    def other(self) -> str:
        return "b" if self.serves == "a" else "a"


@pytest.fixture
def pair(tmp_path: Path, loop: Loop) -> Iterator[Pair]:
    """A run with a master on `a` and a standby on `b` that is ready, under clusters that train."""
    pair = Pair(tmp_path, loop)
    with pair.deployment as deployment:
        pair.start("a")
        deployment.start_slaves()
        for name in deployment.clusters:
            deployment.cluster(name)
        for name in deployment.clusters:
            deployment.seen_after(deployment.timeline(name), "pull_end", within_s=90)
        deployment._set_deadlines()
        pair.start("b")
        pair.wait_until_claimable()
        yield pair
        pair.count_unreported()
        deployment.check()


def test_the_masters_machine_is_lost(pair: Pair) -> None:
    """Process and directory are gone at once: the standby serves within SERVES_S; nothing that was told is undone."""
    deployment = pair.deployment
    deployment.progress(2, by=deployment.clusters)
    told = pair.newest_told()
    pair.lose("a")
    took_s = pair.wait_for_takeover("b")
    print(f"served after {took_s:.1f} s")
    deployment.progress(2, by=deployment.clusters)
    assert told in deployment.lineage()
    with deployment.ledger() as ledger:
        assert {p.name: p.inc for p in ledger.read_state().clusters} == dict.fromkeys(deployment.clusters, 1)


def test_a_master_that_is_cut_off_from_the_mirror_steps_down(pair: Pair) -> None:
    """It is alive, and everybody reaches it: it ends before the standby serves, and θ is the reference's."""
    deployment = pair.deployment
    deployment.progress(2, by=deployment.clusters)
    told, first = pair.newest_told(), pair.processes["a"]
    pair.cut_off("a")
    since = time.monotonic()
    deployment.until(lambda: first.code is not None or pair.is_serving("b"), SERVES_S, "the first one ends")
    assert first.code == STALE and not pair.is_serving("b")
    pair.wait_for_takeover("b", SERVES_S - (time.monotonic() - since))
    deployment.progress(2, by=deployment.clusters)
    assert told in deployment.lineage()
    pair.connect("a")
    pair.start("a")  # it comes back as a standby, beside a ledger that is old
    pair.wait_until_claimable()
    assert not pair.is_serving("a")


def test_a_master_that_is_stopped_wakes_beside_its_successor(pair: Pair) -> None:
    """It knows nothing of the time that passed, and has an outer step in hand: nothing of it leaves, and it ends."""
    deployment = pair.deployment
    first = pair.processes["a"]
    trap = deployment.orders["ps0"].calls.trap("fold", "after")
    trap.caught()
    os.kill(first.pid, signal.SIGSTOP)
    pair.wait_for_takeover("b")
    deployment.progress(2, by=deployment.clusters)
    trap.release(forward=False)
    os.kill(first.pid, signal.SIGCONT)
    deployment.wait_for_end(first, STALE)
    deployment.progress(2, by=deployment.clusters)


def test_standbys_that_are_cut_off_or_die_hold_nothing_up(pair: Pair) -> None:
    """Rounds go on without a pause, and the master serves without the store again when the standby is gone."""
    deployment = pair.deployment
    pair.cut_off("b")
    deployment.progress(4, by=deployment.clusters)
    deployment.wait_for_status(lambda s: not s["lease"]["claimable"], SEEN_S, "the standby is gone")
    pair.cut_off("a")  # nobody may take over: the mirror lags, and that is all
    deployment.wait_for_status(lambda s: s["ledger_mirror"]["red"], SEEN_S, "the mirror lags")
    deployment.progress(4, by=deployment.clusters)
    assert pair.processes["a"].code is None
    pair.connect("a")
    pair.connect("b")
    pair.wait_until_claimable()


@pytest.mark.timeout(120 + 90 * KILLS)
def test_either_is_killed_again_and_again(pair: Pair) -> None:
    """At any moment, with its directory or without; whoever was killed comes back. DIPS_STANDBY_KILLS: how often."""
    deployment, rng = pair.deployment, random.Random(int(os.environ.get("DIPS_STANDBY_SEED", "1")))
    for n in range(KILLS):
        deployment.progress(rng.randrange(1, 4))
        told = pair.newest_told()
        serves, waits = pair.serves, pair.other
        victim, with_disk = rng.choice((serves, serves, waits)), rng.random() < 0.5
        print(f"kill {n}: {victim}, which {'serves' if victim == serves else 'waits'}, {with_disk=}")
        if with_disk:
            pair.lose(victim)
        else:
            pair.processes[victim].kill()
        if victim == serves:
            pair.wait_for_takeover(waits)
        pair.start(victim)
        deployment.progress(1)
        assert told in deployment.lineage(), f"kill {n}"
        pair.wait_until_claimable()
