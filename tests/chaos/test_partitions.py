"""A link that parts, both ways or one way, at a cluster, a slave, or the data flow.

Either side goes on or waits; fencing decides after healing.
"""

from __future__ import annotations

import time

import pytest

from tests.chaos.deployment import LEASE_S, SEEN_S, TOKENS, Deployment
from tests.chaos.wires import DOWN, UP

DEPLOYMENT = {"ranges": False, "secure": True}  # who waits for data ranges cannot train on by itself
BOTH = (UP, DOWN)


@pytest.mark.parametrize("ways", [BOTH, (UP,)], ids=["both ways", "towards the master"])
def test_a_cluster_is_cut_from_the_master(deployment: Deployment, ways: tuple[str, ...]) -> None:
    """The others go on; after its lease it is gone, and comes back as a new incarnation.

    It trained on by itself meanwhile: the deployment checks at the end that those tokens are reported once, as lost.
    """
    since = time.time()
    deployment.to_master["east"].wire.hold(*ways)
    deployment.seen_after(deployment.master_timeline, "cluster_gone", since=since, cluster="east")
    deployment.progress(3, by=("west",))
    deployment.to_master["east"].wire.heal()
    deployment.seen_after(deployment.timeline("east"), "joined", since=since)
    deployment.progress(2, by=deployment.clusters)


def test_a_cluster_hears_nothing_from_the_master(deployment: Deployment) -> None:
    """One way: its heartbeats arrive, so it is alive; it trains on without answers, and no window waits for it for
    long.
    """
    deployment.to_master["east"].wire.hold(DOWN)
    steps = _steps(deployment)
    deployment.progress(4, by=("west",))
    deployment.until(lambda: _steps(deployment) > steps + 4, SEEN_S, "east trains on by itself")
    deployment.to_master["east"].wire.heal()
    deployment.progress(2, by=deployment.clusters)


def test_the_last_words_of_a_incarnation_are_counted_once(deployment: Deployment) -> None:
    """Heartbeats arrive whose answers are lost, then the lease ends: the next incarnation does not report them again.

    The deployment checks at the end that the tokens add up: reported twice, they would not.
    """
    since, steps = time.time(), _steps(deployment)
    deployment.to_master["east"].wire.hold(DOWN)
    deployment.until(lambda: _steps(deployment) > steps + 6, SEEN_S, "east trains on by itself")
    deployment.wait_for_status(
        lambda s: s["clusters"]["east"]["heartbeat"]["tokens_carried"] > 2 * TOKENS["east"],
        SEEN_S,
        "the master knows of it",
    )
    deployment.to_master["east"].wire.hold(UP)
    deployment.seen_after(deployment.master_timeline, "cluster_gone", since=since, cluster="east")
    deployment.to_master["east"].wire.heal()
    deployment.progress(2, by=deployment.clusters)


def test_a_short_cut_ends_no_incarnation(deployment: Deployment) -> None:
    """Connections that are reset within a lease are made anew; nobody is gone, nothing is lost."""
    gone = len(deployment.marks(deployment.master_timeline, "cluster_gone"))
    for line in deployment.to_master.values():
        line.wire.cut()
    for line in deployment.orders.values():
        line.wire.cut()
    for wire in deployment.lanes.values():
        wire.cut()
    deployment.progress(3, by=deployment.clusters)
    assert len(deployment.marks(deployment.master_timeline, "cluster_gone")) == gone


@pytest.mark.parametrize("ways", [BOTH, (UP,), (DOWN,)], ids=["both ways", "towards the slave", "from the slave"])
def test_the_orders_to_a_slave_are_cut(deployment: Deployment, ways: tuple[str, ...]) -> None:
    """Its heartbeats still arrive, so its lease holds: two unresponsive orders say that it is lost. It comes back by
    registering.
    """
    since = time.time()
    deployment.orders["ps1"].wire.hold(*ways)
    deployment.seen_after(deployment.master_timeline, "slave_lost", since=since, slave="ps1")
    deployment.orders["ps1"].wire.heal()
    deployment.seen_after(deployment.master_timeline, "slave_ready", since=since, slave="ps1")
    deployment.progress(2, by=deployment.clusters)


def test_a_slave_is_cut_from_everybody(deployment: Deployment) -> None:
    """Lost by its lease; the clusters train on; healed, it holds what it held, and nothing has to be loaded."""
    since, loads = time.time(), _loads(deployment)
    for wire in deployment.wires("ps1"):
        wire.hold()
    deployment.seen_after(deployment.master_timeline, "slave_lost", since=since, slave="ps1")
    for wire in deployment.wires("ps1"):
        wire.heal()
    deployment.seen_after(deployment.master_timeline, "slave_ready", since=since, slave="ps1")
    deployment.progress(2, by=deployment.clusters)
    assert _loads(deployment) == loads


def test_a_slave_s_heartbeats_are_cut(deployment: Deployment) -> None:
    """One way: orders arrive and its heartbeats do not; the master gives it up, and takes it back."""
    since = time.time()
    deployment.to_master["ps1"].wire.hold(UP)
    deployment.seen_after(deployment.master_timeline, "slave_lost", since=since, slave="ps1")
    deployment.to_master["ps1"].wire.heal()
    deployment.seen_after(deployment.master_timeline, "slave_ready", since=since, slave="ps1")
    deployment.progress(2, by=deployment.clusters)


@pytest.mark.parametrize("ways", [BOTH, (UP,), (DOWN,)], ids=["both ways", "towards the slave", "from the slave"])
def test_the_data_flow_is_cut(deployment: Deployment, ways: tuple[str, ...]) -> None:
    """The control flow lives, so nobody is gone: the transfer stalls, is begun anew, and ends when the link is back."""
    gone = len(deployment.marks(deployment.master_timeline, "cluster_gone"))
    deployment.hold_push("east", ["ps1"], *ways)
    time.sleep(LEASE_S)  # longer than anybody may be silent: the transfer's silence must end no incarnation
    deployment.lanes["ps1"].heal()
    deployment.progress(2, by=deployment.clusters)
    assert len(deployment.marks(deployment.master_timeline, "cluster_gone")) == gone


def test_a_slow_link_loses_nothing(deployment: Deployment) -> None:
    """30 ms more each way on every wire: everything takes longer, nothing breaks."""
    since, skipped = time.time(), len(deployment.skipped())
    wires = [w for name in (*deployment.clusters, *deployment.orders) for w in deployment.wires(name)]
    for wire in wires:
        wire.delay(0.03)
    deployment.progress(2, by=deployment.clusters)
    for wire in wires:
        wire.delay(0.0)
    assert len(deployment.skipped()) == skipped
    assert not [m for m in deployment.marks(deployment.master_timeline, "cluster_gone") if m["at"] > since]


def _loads(deployment: Deployment) -> int:
    return deployment.process("ps1").log.read_text().count("LoadVersion")


def _steps(deployment: Deployment) -> int:
    return len((deployment.directory / "east.steps").read_text().splitlines())
