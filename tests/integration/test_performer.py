"""`supervisor: exec`: the master starts its slaves, starts them again, never twice, and finds them after it died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.integration import cluster_harness as harness
from tests.integration import train_constant as script
from tests.waiting import until

HERE = Path(__file__).parent
TINY = str(HERE / "train_tiny.py")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    tensors = script.tensors()
    shared = {"penalty": {"gates": []}, "stop": {"versions": 200}}
    with harness.Run(tmp_path, tensors, shared=shared) as run:
        content = yaml.safe_load(run.file.read_text())
        for slave in content["slaves"]:
            slave["supervisor"] = "exec"
        run.file.write_text(yaml.safe_dump(content))
        yield run
        left = [pid for name in run.slaves if (pid := pid_of(run, name)) and psutil.pid_exists(pid)]
        for pid in left:  # of a test that failed: nothing stays behind
            os.kill(pid, signal.SIGKILL)


def pid_of(run: Any, slave: str) -> int:
    """Which process says that it holds the slave's directory; 0 for none."""
    path = run.directory / slave / ".lock"
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else 0


def ready(run: Any, slave: str) -> bool:
    log = run.directory / "master" / "slaves" / f"{slave}.log"
    return log.exists() and '"event": "ready"' in log.read_text()


def until_gone(pid: int) -> None:
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, pid, 30)


@pytest.mark.timeout(180)
def test_a_killed_slave_comes_back_by_itself(run: Any, tmp_path: Path) -> None:
    """The master starts both; one is killed in the middle of the training; versions go on; SIGTERM ends all."""
    master = run.start_master()
    run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")])
    run.until(lambda: len(run.versions()) >= 2, 60, "two versions")
    first = pid_of(run, "ps0")
    os.kill(first, signal.SIGKILL)
    run.until(lambda: pid_of(run, "ps0") not in (0, first), 30, "a new process holds the directory")
    at = len(run.versions())
    run.until(lambda: len(run.versions()) >= at + 2, 60, "two more versions")
    pids = [pid_of(run, name) for name in run.slaves]
    assert master.terminate() == 0
    for pid in (first, *pids):
        assert not psutil.pid_exists(pid)
    assert "slave ended" in master.log.read_text()


@pytest.mark.timeout(180)
def test_a_killed_master_finds_its_slaves(run: Any) -> None:
    """SIGKILL of the master leaves the slaves alive; the next adopts them by the locks, and supervises them."""
    master = run.start_master()
    run.until(lambda: all(ready(run, name) for name in run.slaves), 60, "both are ready")
    pids = [pid_of(run, name) for name in run.slaves]
    master.kill()
    assert all(psutil.pid_exists(pid) for pid in pids)
    second = run.start_master()
    run.until(lambda: second.log.read_text().count("slave adopted") == 2, 30, "both are adopted")
    assert [pid_of(run, name) for name in run.slaves] == pids
    os.kill(pids[1], signal.SIGKILL)
    run.until(lambda: pid_of(run, "ps1") not in (0, pids[1]), 30, "an adopted one that dies is replaced")
    assert second.terminate() == 0
    for pid in (*pids, pid_of(run, "ps1")):
        until_gone(pid)


@pytest.mark.timeout(180)
def test_a_stopped_slave_is_killed_before_its_successor_starts(run: Any) -> None:
    """SIGSTOP: it is lost, killed by its pidfd, seen dead, and only then is there another (docs/rationale.md#28)."""
    master = run.start_master()
    run.until(lambda: all(ready(run, name) for name in run.slaves), 60, "both are ready")
    stopped = pid_of(run, "ps0")
    os.kill(stopped, signal.SIGSTOP)
    run.until(lambda: "slave hangs: killed" in master.log.read_text(), 60, "it is killed")
    run.until(lambda: pid_of(run, "ps0") not in (0, stopped), 30, "another holds the directory")
    assert not psutil.pid_exists(stopped)
    assert "held by another" not in (run.directory / "master" / "slaves" / "ps0.log").read_text()


@pytest.mark.timeout(120)
def test_a_second_slave_on_a_directory_is_told_who_holds_it(run: Any) -> None:
    """One slave for a directory: exit code 78, and the process that holds it is named."""
    run.start_master()
    run.until(lambda: ready(run, "ps0"), 60, "it is ready")
    second = subprocess.run(
        [*harness.daemon("slave"), "--config", str(run.file), "--name", "ps0"],
        cwd=harness.ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert second.returncode == 78
    assert f"held by another running slave (pid {pid_of(run, 'ps0')})" in second.stderr
