"""Partitions by the kernel: the packets of one process group are dropped by nftables in a network namespace of its own.

The first test makes the namespace and runs this file inside it, where the others are; elsewhere they are not run. A
wire of wires.py ends TCP connections at itself; here the connections of gRPC and ZeroMQ meet real loss.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.chaos.deployment import Deployment
from tests.integration.cluster_harness import ROOT
from tests.integration.machines import missing

INSIDE = "DIPS_CHAOS_NAMESPACE"
TABLE = "dips_chaos"
DEPLOYMENT = {"ranges": False, "groups": True}  # who waits for data ranges cannot train on by itself
CHAINS = f"""table inet {TABLE} {{
 chain out {{ type filter hook output priority 0; }}
 chain in {{ type filter hook input priority 0; }}
}}
"""
UP, DOWN = "out", "in"  # of the machine that is cut
inside = pytest.mark.skipif(INSIDE not in os.environ, reason="runs within the namespace that the first test makes")


@pytest.mark.skipif(INSIDE in os.environ, reason="it is this namespace")
@pytest.mark.timeout(600)
@pytest.mark.real_commands  # a fork has modules that plugins of the inner pytest would have it rewrite
def test_partitions_in_a_network_namespace() -> None:
    """Everything below holds where packets are dropped; the namespace is gone afterwards."""
    if why := missing(("ip", "nft", "setpriv"), "iproute2, nftables, util-linux"):
        pytest.skip(f"NO NAMESPACES: {why}; the wires of test_partitions.py are what is left")
    name = f"dips-chaos-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "chaos", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(
            ["ip", "netns", "exec", name, *words], cwd=ROOT, env={**os.environ, INSIDE: name}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout[-20_000:]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def filtered() -> Iterator[None]:
    """A packet filter with no rule."""
    _nft(CHAINS)
    yield
    _nft(f"delete table inet {TABLE}\n")


@inside
@pytest.mark.parametrize("ways", [(UP, DOWN), (UP,)], ids=["both ways", "towards the others"])
def test_a_cluster_s_packets_are_dropped(deployment: Deployment, filtered: None, ways: tuple[str, ...]) -> None:
    """Agent, rank and their ZeroMQ streams: gone after the lease; the others go on; it comes back as a new
    incarnation.
    """
    since = time.time()
    _drop(deployment, "east", ways)
    deployment.seen_after(deployment.master_timeline, "cluster_gone", since=since, cluster="east")
    deployment.progress(3, by=("west",))
    _pass()
    deployment.progress(2, by=deployment.clusters)


@inside
def test_a_slave_s_packets_are_dropped(deployment: Deployment, filtered: None) -> None:
    """Lost, and back with what it held."""
    since = time.time()
    _drop(deployment, "ps1", (UP, DOWN))
    deployment.seen_after(deployment.master_timeline, "slave_lost", since=since, slave="ps1")
    _pass()
    deployment.seen_after(deployment.master_timeline, "slave_ready", since=since, slave="ps1")
    deployment.progress(2, by=deployment.clusters)


def _drop(deployment: Deployment, who: str, ways: tuple[str, ...]) -> None:
    """Drop what this process and its children send, and what answers it."""
    assert deployment.groups is not None
    group = deployment.groups[who]
    rules = [f"add rule inet {TABLE} out meta skgid {group} ct mark set {group}"]
    rules += [f"add rule inet {TABLE} out meta skgid {group} drop"] if UP in ways else []
    rules += [f"add rule inet {TABLE} in ct mark {group} ct direction reply drop"] if DOWN in ways else []
    _nft("\n".join(rules) + "\n")


def _pass() -> None:
    _nft(f"flush table inet {TABLE}\n")


def _nft(script: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
