"""One whole run by the commands that users type, each a process of its own: nothing here is forked from a server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration import cluster_harness as harness
from tests.integration import train_constant as script

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent  # where pip puts console scripts


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.real_commands
@pytest.mark.timeout(240)
def test_a_run_by_its_console_scripts(tmp_path: Path) -> None:
    """dips-master, dips-slave, dips-client and torchrun: two ranks push and pull until the third version."""
    tensors = script.tensors()
    shared = {"stop": {"versions": 3}, "penalty": {"gates": []}}
    with harness.Run(tmp_path, tensors, shared=shared) as run:
        run.commands = {role: [str(BIN / f"dips-{role}")] for role in ("master", "slave", "client")}
        run.start_servers()
        train = [str(HERE / "train_constant.py"), "fast", "64", "1", str(tmp_path / "out")]
        fast = run.start_cluster("fast", [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", *train])
        run.wait(fast, 200)
        assert len(run.versions()) == 3
        assert [(tmp_path / f"out.{rank}").exists() for rank in range(2)] == [True, True]
