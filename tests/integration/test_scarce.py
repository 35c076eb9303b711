"""Real daemons that lack something for a while: room for their logs, file descriptors, a wall clock that is right."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.cluster_harness import Process, Run, daemon
from tests.integration.test_client_agent import TINY
from tests.integration.train_constant import tensors

CLI = [sys.executable, "-c", "from dips.cli import main; main()"]
NO_ROOM = ["/bin/sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh"]  # each line is answered with ENOSPC
# The wall clock of the master alone: to set the machine's would be felt by everybody on it.
SHIFTED = """import sys, time; from pathlib import Path
true, shift = time.time, Path(sys.argv.pop(1))
time.time = lambda: true() + float(shift.read_text())
from dips.master.app import main; main()"""
DAY_S = 86_400.0
LOST = ("slave_lost", "cluster_gone", "round_skipped", "the coordinator failed")


@contextmanager
def one_cluster(directory: Path, versions: int = 10_000) -> Iterator[Run]:
    """A run whose master starts when the test says so."""
    with Run(directory, tensors(), shared={"stop": {"versions": versions}, "penalty": {"gates": []}}) as run:
        yield run


def start_trainer(run: Run) -> Process:
    """Of a cluster whose rounds take a third of a second: few versions are made while a command runs."""
    return run.start_cluster("fast", [sys.executable, TINY, "steps", str(run.directory / "fast.out")], steps=15)


def wait_for_versions(run: Run, more: int, what: str) -> None:
    begun = run.head().version
    run.until(lambda: run.head().version >= begun + more, 60, f"{more} versions {what}")


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(180)
def test_no_room_for_logs_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    """Master, slaves and agent on a log disk that is full from their first line on: the run comes to its end."""
    with one_cluster(tmp_path, versions=5) as run:
        run.commands = {role: [*NO_ROOM, *daemon(role)] for role in run.commands}
        daemons = [run.start_master(), *run.start_slaves()]
        run.wait(start_trainer(run), 120)
        assert run.head().version == 5 and all(process.code is None for process in daemons)
        assert [process.terminate() for process in daemons] == [0, 0, 0]


@pytest.mark.torchrun
@pytest.mark.timeout(180)
def test_a_master_without_file_descriptors_serves_those_it_has(tmp_path: Path) -> None:
    """Rounds go on over the connections that are there; who comes new waits, and is served when there is room."""
    with one_cluster(tmp_path) as run:
        master = run.start_master()
        run.start_slaves()
        start_trainer(run)
        wait_for_versions(run, 2, "before")
        soft, hard = resource.prlimit(master.pid, resource.RLIMIT_NOFILE)
        in_use = len(list(Path(f"/proc/{master.pid}/fd").iterdir()))
        resource.prlimit(master.pid, resource.RLIMIT_NOFILE, (in_use, hard))
        asking = subprocess.Popen([*CLI, "status", "--json", "--config", str(run.file)], stdout=subprocess.PIPE)
        run.until(lambda: "File descriptor limit reached" in master.tail(1000), 30, "nobody new is let in")
        wait_for_versions(run, 2, "without a descriptor that is free")  # within 3 s: status connects no longer
        resource.prlimit(master.pid, resource.RLIMIT_NOFILE, (soft, hard))
        said, _ = asking.communicate(timeout=60)
        assert asking.returncode == 0 and json.loads(said)["run"] == "test"
        wait_for_versions(run, 2, "after")
        assert not any(lost in master.tail(10_000) for lost in LOST)


@pytest.mark.torchrun
@pytest.mark.timeout(180)
def test_a_wall_clock_that_jumps_loses_nobody(tmp_path: Path) -> None:
    """A day back, two days on: leases, windows and deadlines are the monotonic clock's, and no age is below 0."""
    shift, coming = tmp_path / "shift", tmp_path / "shift.new"
    shift.write_text("0")
    with one_cluster(tmp_path) as run:
        run.commands["master"] = [sys.executable, "-c", SHIFTED, str(shift)]
        master = run.start_master()
        run.start_slaves()
        start_trainer(run)
        wait_for_versions(run, 2, "before")
        for days in (-1, 1):
            coming.write_text(str(days * DAY_S))
            coming.rename(shift)
            wait_for_versions(run, 2, f"with a clock that is {days} days off")
            newest = json.loads(subprocess.check_output([*CLI, "status", "--json", "--config", str(run.file)]))[
                "newest"
            ]
            assert 0 <= time.time() + days * DAY_S - newest["committed"] < 60 and newest["clusters"] == 1
        subprocess.run([*CLI, "history", "--config", str(run.file)], check=True, stdout=subprocess.DEVNULL)
        assert not any(lost in master.tail(10_000) for lost in LOST)
