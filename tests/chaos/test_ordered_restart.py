"""All daemons are restarted one after another, by readiness, while two clusters train: an upgrade as operators do it.

Each slave drains in its own name, as a preStop hook does, ends by SIGTERM, comes back and is READY before the next one
begins; the master is the last. No version is lost, and no round is skipped for a slave. How long the run stood still is
printed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from itertools import pairwise

from typer.testing import CliRunner

from dips.cli import cli
from dips.config import host_port
from tests.chaos.deployment import SEEN_S, Deployment

DRAIN_S = 60


def is_ready(deployment: Deployment, name: str) -> bool:
    """What `/readyz` of a slave says: it is READY at the head; of the master: it is proven and has its slaves."""
    with socket.socket() as asked:  # a question to a closed port would be explained by a thread that stays
        if asked.connect_ex(host_port(deployment.address)) != 0:
            return False
    status = deployment.status()
    if status is None:
        return False
    names = deployment.slaves if name == "master" else [name]
    return all(status["slaves"][n]["state"] == "ready" for n in names)


def test_every_daemon_is_restarted_in_order(deployment: Deployment) -> None:
    """No committed version is lost, no round is skipped for a drained slave, and every standstill is short."""
    deployment.progress(3, by=deployment.clusters)
    before, skipped = deployment.lineage(), len(deployment.skipped())
    stood: dict[str, float] = {}
    for name in deployment.slaves:
        stood[name] = _time_of(lambda name=name: _restart_slave(deployment, name))  # type: ignore[misc]
        deployment.progress(2, by=deployment.clusters)
    assert deployment.skipped()[skipped:] == [], "a round was skipped for a slave that had drained"
    stood["master"] = _time_of(lambda: _restart_master(deployment))
    deployment.progress(2, by=deployment.clusters)
    after = deployment.lineage()
    assert after[: len(before)] == before, "a committed version is no longer in the lineage"
    assert all("was lost" not in why for why in deployment.skipped()[skipped:]), deployment.skipped()[skipped:]
    marks = [mark["at"] for mark in deployment.marks(deployment.master_timeline, "version_committed")]
    gaps = sorted(later - earlier for earlier, later in pairwise(marks))
    told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stood.items())
    print(f"stood still: {told}; between versions: median {gaps[len(gaps) // 2]:.2f} s, longest {gaps[-1]:.1f} s")


def _restart_slave(deployment: Deployment, name: str) -> None:
    words = ["drain", name, "--self", "--config", str(deployment.file), "--wait-s", str(DRAIN_S)]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, f"{done.output} {done.exception!r}"
    deployment.process(name).terminate()
    deployment.start_slave(name)
    deployment.until(lambda: is_ready(deployment, name), SEEN_S, f"{name} is ready")


def _restart_master(deployment: Deployment) -> None:
    deployment.process("master").terminate()
    deployment.start_master()
    deployment.until(lambda: is_ready(deployment, "master"), SEEN_S, "the master is ready")


def _time_of(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
