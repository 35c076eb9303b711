"""Two masters, two incarnations of one cluster: who came later is obeyed, who came earlier leaves."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import yaml

from tests.chaos.deployment import LEASE_S, SEEN_S, Deployment, address
from tests.chaos.wires import Loop
from tests.integration.cluster_harness import daemon

DEPLOYMENT = {"secure": True}
CONFIG, STALE = 78, 75


def test_a_second_master_is_refused_by_the_lock(deployment: Deployment) -> None:
    """On the same directory: it names the holder and ends; the first does not notice."""
    pid = deployment.process("master").pid
    second = deployment._start("second", [*daemon("master"), "--config", str(deployment.file)])
    deployment.wait(second, SEEN_S, CONFIG)
    assert f"pid {pid}" in second.log.read_text()
    deployment.progress(2, by=deployment.clusters)


def test_a_second_master_on_a_copied_ledger_wins_by_its_term(tmp_path: Path, loop: Loop) -> None:
    """The first sleeps, holding a fold's answer; the second begins a later term; the first wakes, asks, and leaves."""
    with Deployment(tmp_path, loop, secure=True) as deployment:
        deployment.start()
        first = deployment.process("master")
        trap = deployment.orders["ps0"].calls.trap("fold", "after")
        trap.caught()
        os.kill(first.pid, signal.SIGSTOP)
        second = _take_over(deployment)
        deployment.progress(2, by=deployment.clusters)
        trap.release(forward=False)
        os.kill(first.pid, signal.SIGCONT)
        deployment.wait(first, SEEN_S, STALE)
        deployment.progress(2, by=deployment.clusters)
        deployment.check()
        assert second.code is None


def _take_over(deployment: Deployment):  # type: ignore[no-untyped-def]
    """Start a master on a copy of the ledger, and lead everybody to it."""
    copy = deployment.directory / "master2"
    shutil.copytree(deployment.master_directory, copy, ignore=shutil.ignore_patterns("*.lock"))
    file = yaml.safe_load(deployment.file.read_text())
    file["master"] |= {"directory": str(copy), "listen": address()}
    other = deployment.directory / "dips2.yaml"
    other.write_text(yaml.safe_dump(file))
    second = deployment._start("master2", [*daemon("master"), "--config", str(other)])
    deployment.address, deployment.master_directory = file["master"]["listen"], copy
    for line in deployment.to_master.values():
        line.calls.retarget(deployment.address)
        line.wire.cut()
    return second


def test_a_zombie_agent_wakes_while_its_successor_pushes(deployment: Deployment) -> None:
    """The old incarnation is fenced: it changes nothing, and exits 75; the successor's push counts."""
    zombie, since = deployment.process("east"), time.time()
    sleeping = [zombie.pid, *deployment.ranks("east")]
    for pid in sleeping:
        os.kill(pid, signal.SIGSTOP)
    place = f"east-after-{zombie.pid}"
    deployment.cluster("east", place=place)
    deployment.seen_after(deployment.timeline(place), "pull_end", since=since)
    deployment.hold_push("east", list(deployment.lanes), place=place)
    for pid in sleeping:
        os.kill(pid, signal.SIGCONT)
    deployment.wait(zombie, SEEN_S, STALE)
    deployment.count_untold("east", since - LEASE_S)  # a zombie's steps count for nothing
    for lane in deployment.lanes.values():
        lane.heal()
    deployment.progress(2, by=("east",))
    deployment.end_agent("east")  # the next test finds east where it was
    deployment.cluster("east")
