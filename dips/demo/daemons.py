"""The commands that the demo starts: master, slaves, agents with their trainers, and words of `dips`."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from dips.commands.status import ask_view
from dips.demo.layout import DemoLayout
from dips.demo.processes import DemoProcesses, ProcessEnded
from dips.errors import Unavailable
from dips.protocol.view import RunView
from dips.transport.endpoints import Endpoint

RANKS = {"fast": 2, "slow": 1}
SLOWDOWN = {"fast": 1.0, "slow": 3.0}  # on two cores; fast's ranks share them and exchange shards, too
STATUS_S = 2.0  # for the master to answer


def start_master(running: DemoProcesses, files: DemoLayout) -> None:
    """Start the master, for the first time or again."""
    command = module_command("dips.master.app", "--config", str(files.run_file))
    running.start("master", command, files.log_file("master"))


def start_slave(running: DemoProcesses, files: DemoLayout, name: str) -> None:
    """Start a slave, for the first time or again."""
    command = module_command("dips.slave.app", "--config", str(files.run_file), "--name", name)
    running.start(name, command, files.log_file(name))


def start_cluster(running: DemoProcesses, files: DemoLayout, name: str, seed: int) -> None:
    """Start a cluster's agent, which starts its trainer."""
    trainer = module_command(
        *("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[name])),
        *("-m", "dips.demo.train", "--seed", str(seed), "--slowdown", str(SLOWDOWN[name])),
    )
    agent = module_command("dips.client.app", "--config", str(files.cluster_file(name)), "--", *trainer)
    running.start(name, agent, files.log_file(name), may_end=True)


def module_command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def run_word(*arguments: str) -> str:
    """Run a word of `dips` to its end and return what it said; raise ProcessEnded with that if it fails."""
    done = subprocess.run(module_command("dips.cli", *arguments), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = f"dips {' '.join(arguments)} ended with exit code {done.returncode}: {done.stderr.strip()}"
        raise ProcessEnded(said, done.returncode)
    return done.stdout.strip()


def read_status(master: Endpoint) -> RunView | None:
    """The master's status; None if it does not answer."""
    try:
        return asyncio.run(ask_view(master, deadline_s=STATUS_S))
    except Unavailable:
        return None
