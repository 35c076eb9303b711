"""A link that parts, both ways or one way, at a cluster, a slave, or the data flow.

Either side goes on or waits; fencing decides after healing.
"""

from __future__ import annotations

import time

import pytest

from tests.chaos.house import LEASE_S, SEEN_S, TOKENS, Deployment
from tests.chaos.wires import DOWN, UP

HOUSE = {"ranges": False}  # who waits for data ranges cannot train on by itself
BOTH = (UP, DOWN)


@pytest.mark.parametrize("ways", [BOTH, (UP,)], ids=["both ways", "towards the master"])
def test_a_cluster_is_cut_from_the_master(house: Deployment, ways: tuple[str, ...]) -> None:
    """The others go on; after its lease it is gone, and comes back as a new incarnation.

    It trained on by itself meanwhile: the house checks at the end that those tokens are told once, as lost.
    """
    since = time.time()
    house.to_master["east"].wire.hold(*ways)
    house.seen_after(house.master_timeline, "cluster_gone", since=since, cluster="east")
    house.progress(3, by=("west",))
    house.to_master["east"].wire.heal()
    house.seen_after(house.timeline("east"), "joined", since=since)
    house.progress(2, by=house.clusters)


def test_a_cluster_hears_nothing_from_the_master(house: Deployment) -> None:
    """One way: its heartbeats arrive, so it is alive; it trains on without answers, and no window waits for it for
    long.
    """
    house.to_master["east"].wire.hold(DOWN)
    steps = _steps(house)
    house.progress(4, by=("west",))
    house.until(lambda: _steps(house) > steps + 4, SEEN_S, "east trains on by itself")
    house.to_master["east"].wire.heal()
    house.progress(2, by=house.clusters)


def test_the_last_words_of_a_incarnation_are_counted_once(house: Deployment) -> None:
    """Heartbeats are heard whose answers are lost, then the lease ends: the next incarnation does not tell it again.

    The house checks at the end that the tokens add up: told twice, they would not.
    """
    since, steps = time.time(), _steps(house)
    house.to_master["east"].wire.hold(DOWN)
    house.until(lambda: _steps(house) > steps + 6, SEEN_S, "east trains on by itself")
    house.wait_for_status(
        lambda s: s["clusters"]["east"]["tokens_carried"] > 2 * TOKENS["east"], SEEN_S, "the master hears of it"
    )
    house.to_master["east"].wire.hold(UP)
    house.seen_after(house.master_timeline, "cluster_gone", since=since, cluster="east")
    house.to_master["east"].wire.heal()
    house.progress(2, by=house.clusters)


def test_a_short_cut_ends_no_incarnation(house: Deployment) -> None:
    """Connections that are reset within a lease are made anew; nobody is gone, nothing is lost."""
    gone = len(house.marks(house.master_timeline, "cluster_gone"))
    for line in house.to_master.values():
        line.wire.cut()
    for line in house.orders.values():
        line.wire.cut()
    for wire in house.lanes.values():
        wire.cut()
    house.progress(3, by=house.clusters)
    assert len(house.marks(house.master_timeline, "cluster_gone")) == gone


@pytest.mark.parametrize("ways", [BOTH, (UP,), (DOWN,)], ids=["both ways", "towards the slave", "from the slave"])
def test_the_orders_to_a_slave_are_cut(house: Deployment, ways: tuple[str, ...]) -> None:
    """Its heartbeats still arrive, so its lease holds: two unresponsive orders say that it is lost. It comes back by
    registering.
    """
    since = time.time()
    house.orders["ps1"].wire.hold(*ways)
    house.seen_after(house.master_timeline, "slave_lost", since=since, slave="ps1")
    house.orders["ps1"].wire.heal()
    house.seen_after(house.master_timeline, "slave_ready", since=since, slave="ps1")
    house.progress(2, by=house.clusters)


def test_a_slave_is_cut_from_everybody(house: Deployment) -> None:
    """Lost by its lease; the clusters train on; healed, it holds what it held, and nothing has to be loaded."""
    since, loads = time.time(), _loads(house)
    for wire in house.wires("ps1"):
        wire.hold()
    house.seen_after(house.master_timeline, "slave_lost", since=since, slave="ps1")
    for wire in house.wires("ps1"):
        wire.heal()
    house.seen_after(house.master_timeline, "slave_ready", since=since, slave="ps1")
    house.progress(2, by=house.clusters)
    assert _loads(house) == loads


def test_a_slave_s_heartbeats_are_cut(house: Deployment) -> None:
    """One way: it hears orders and cannot be heard heartbeating; the master gives it up, and takes it back."""
    since = time.time()
    house.to_master["ps1"].wire.hold(UP)
    house.seen_after(house.master_timeline, "slave_lost", since=since, slave="ps1")
    house.to_master["ps1"].wire.heal()
    house.seen_after(house.master_timeline, "slave_ready", since=since, slave="ps1")
    house.progress(2, by=house.clusters)


@pytest.mark.parametrize("ways", [BOTH, (UP,), (DOWN,)], ids=["both ways", "towards the slave", "from the slave"])
def test_the_data_flow_is_cut(house: Deployment, ways: tuple[str, ...]) -> None:
    """The control flow lives, so nobody is gone: the transfer stalls, is begun anew, and ends when the link is back."""
    gone = len(house.marks(house.master_timeline, "cluster_gone"))
    house.hold_push("east", ["ps1"], *ways)
    time.sleep(LEASE_S)  # longer than anybody may be silent: the transfer's silence must end no incarnation
    house.lanes["ps1"].heal()
    house.progress(2, by=house.clusters)
    assert len(house.marks(house.master_timeline, "cluster_gone")) == gone


def test_a_slow_link_loses_nothing(house: Deployment) -> None:
    """30 ms more each way on every wire: everything takes longer, nothing breaks."""
    since, skipped = time.time(), len(house.skipped())
    wires = [w for name in (*house.clusters, *house.orders) for w in house.wires(name)]
    for wire in wires:
        wire.delay(0.03)
    house.progress(2, by=house.clusters)
    for wire in wires:
        wire.delay(0.0)
    assert len(house.skipped()) == skipped
    assert not [m for m in house.marks(house.master_timeline, "cluster_gone") if m["at"] > since]


def _loads(house: Deployment) -> int:
    return house.process("ps1").log.read_text().count("LoadVersion")


def _steps(house: Deployment) -> int:
    return len((house.directory / "east.steps").read_text().splitlines())
