"""Starts a run's daemons on this machine, and runs the `dips` commands that make it, as an operator would."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dips.commands.status import ask_view
from dips.errors import Unavailable
from dips.local.processes import LocalProcess, LocalProcesses, ProcessEnded
from dips.protocol.view import RunView
from dips.transport.endpoints import Endpoint

LOGS = "logs"  # directory beside the run file with NAME.log of each process
STATUS_S = 2.0  # timeout of the master's answer


def log_file(run_file: Path, name: str) -> Path:
    return run_file.parent / LOGS / f"{name}.log"


def start_master(running: LocalProcesses, run_file: Path) -> LocalProcess:
    """Start or restart the master."""
    command = module_command("dips.master.app", "--config", str(run_file))
    return running.start("master", command, log_file(run_file, "master"))


def start_slave(running: LocalProcesses, run_file: Path, name: str) -> LocalProcess:
    """Start or restart a slave."""
    command = module_command("dips.slave.app", "--config", str(run_file), "--name", name)
    return running.start(name, command, log_file(run_file, name))


def start_cluster(
    running: LocalProcesses,
    run_file: Path,
    cluster_file: Path,
    name: str,
    command: Sequence[str],
    show: bool = False,
) -> LocalProcess:
    """Start a cluster's agent, which starts the training command; `show`: print their output, too."""
    agent = module_command("dips.client.app", "--config", str(cluster_file), "--", *command)
    return running.start(name, agent, log_file(run_file, name), may_end=True, show=show)


def module_command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def run_word(*arguments: str) -> str:
    """Run a `dips` command and return its output. Raises ProcessEnded with its errors if it fails."""
    done = subprocess.run(module_command("dips.cli", *arguments), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = f"dips {' '.join(arguments)} ended with exit code {done.returncode}: {done.stderr.strip()}"
        raise ProcessEnded(said, done.returncode)
    return done.stdout.strip()


def read_status(master: Endpoint) -> RunView | None:
    """Return the master's status; None if it does not answer."""
    try:
        return asyncio.run(ask_view(master, deadline_s=STATUS_S))
    except Unavailable:
        return None
