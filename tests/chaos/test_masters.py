"""Two masters, two incarnations of one cluster: who came later is obeyed, who came earlier leaves."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import yaml

from tests.chaos.house import LEASE_S, SEEN_S, Deployment, address
from tests.chaos.wires import Loop
from tests.integration.cluster_harness import daemon

CONFIG, STALE = 78, 75


def test_a_second_master_is_refused_by_the_lock(house: Deployment) -> None:
    """On the same directory: it names the holder and ends; the first does not notice."""
    pid = house.process("master").pid
    second = house._start("second", [*daemon("master"), "--config", str(house.file)])
    house.wait(second, SEEN_S, CONFIG)
    assert f"pid {pid}" in second.log.read_text()
    house.progress(2, by=house.clusters)


def test_a_second_master_on_a_copied_ledger_wins_by_its_term(tmp_path: Path, loop: Loop) -> None:
    """The first sleeps, holding a fold's answer; the second begins a later term; the first wakes, asks, and leaves."""
    with Deployment(tmp_path, loop) as house:
        house.start()
        first = house.process("master")
        trap = house.orders["ps0"].calls.trap("fold", "after")
        trap.caught()
        os.kill(first.pid, signal.SIGSTOP)
        second = _take_over(house)
        house.progress(2, by=house.clusters)
        trap.release(forward=False)
        os.kill(first.pid, signal.SIGCONT)
        house.wait(first, SEEN_S, STALE)
        house.progress(2, by=house.clusters)
        house.check()
        assert second.code is None


def _take_over(house: Deployment):  # type: ignore[no-untyped-def]
    """Start a master on a copy of the ledger, and lead everybody to it."""
    copy = house.directory / "master2"
    shutil.copytree(house.master_directory, copy, ignore=shutil.ignore_patterns("*.lock"))
    file = yaml.safe_load(house.file.read_text())
    file["master"] |= {"directory": str(copy), "listen": address()}
    other = house.directory / "dips2.yaml"
    other.write_text(yaml.safe_dump(file))
    second = house._start("master2", [*daemon("master"), "--config", str(other)])
    house.address, house.master_directory = file["master"]["listen"], copy
    for line in house.to_master.values():
        line.calls.retarget(house.address)
        line.wire.cut()
    return second


def test_a_zombie_agent_wakes_while_its_successor_pushes(house: Deployment) -> None:
    """The old incarnation is fenced: it changes nothing, and exits 75; the successor's push counts."""
    zombie, since = house.process("east"), time.time()
    sleeping = [zombie.pid, *house.ranks("east")]
    for pid in sleeping:
        os.kill(pid, signal.SIGSTOP)
    place = f"east-after-{zombie.pid}"
    house.cluster("east", place=place)
    house.seen_after(house.timeline(place), "pull_end", since=since)
    house.hold_push("east", list(house.lanes), place=place)
    for pid in sleeping:
        os.kill(pid, signal.SIGCONT)
    house.wait(zombie, SEEN_S, STALE)
    house.count_untold("east", since - LEASE_S)  # a zombie's steps count for nothing
    for lane in house.lanes.values():
        lane.heal()
    house.progress(2, by=("east",))
    house.end_agent("east")  # the next test finds east where it was
    house.cluster("east")
