"""No process survives a test that was killed: not the daemons, not what they started, not what ignores SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster_harness import ROOT
from tests.waiting import until

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[2] == "parent":
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"], start_new_session=True)
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
time.sleep(600)
"""
TEST = """
import subprocess, sys, time
import numpy as np
from tests.integration.cluster_harness import Run

def test_that_hangs(tmp_path):
    with Run(tmp_path, {{"w": np.zeros(4, np.float32)}}, slaves=1) as run:
        run.start_servers()
        run.start_cluster("west", [sys.executable, {stubborn!r}, {pids!r}, "parent"])
        subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 600 & wait"], start_new_session=True)
        time.sleep(600)
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.real_commands
def test_nothing_is_left(tmp_path: Path, workers: int) -> None:
    """SIGKILL of pytest, alone or leading a worker, in the middle of a test: soon all it started is gone."""
    stubborn, pids, test = tmp_path / "stubborn.py", tmp_path / "pids", tmp_path / "test_hangs.py"
    stubborn.write_text(STUBBORN)
    test.write_text(TEST.format(stubborn=str(stubborn), pids=str(pids)))
    plugins = [word for name in ("tests.conftest", "tests.integration.conftest") for word in ("-p", name)]
    words = ["-m", "pytest", "-q", *plugins, "-n", str(workers), "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    with (tmp_path / "pytest.log").open("w") as log:
        killed = subprocess.Popen(
            [sys.executable, *words, "-c", str(ROOT / "pyproject.toml"), str(test)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until(lambda: len(lines(pids)) == 2 or killed.poll() is not None, (tmp_path / "pytest.log").read_text, 150)
        assert killed.poll() is None, (tmp_path / "pytest.log").read_text()[-4000:]
        started = psutil.Process(killed.pid).children(recursive=True)
        names = [" ".join(p.cmdline()) for p in started]
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    for what in ("master", "slave", "client"):
        assert any(f"dips.{what}.app" in name for name in names), f"{what} did not run: {names}"
    for what in ("stubborn.py", "sleep 600", "forkserver", "guard.py"):
        assert any(what in name for name in names), f"{what} did not run: {names}"
    assert {p.pid for p in started} >= set(lines(pids))
    until(lambda: not any(lives(p) for p in started), (tmp_path / "pytest.log").read_text, 20)


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
