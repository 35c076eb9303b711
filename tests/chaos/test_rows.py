"""The twelve rows of the failure table (docs/architecture.md#failure-table), one test or more for each, named for
it."""

from __future__ import annotations

import os
import random
import signal
import socket
import time

import pytest

from tests.chaos.deployment import LEASE_S, SEEN_S, TOKENS, Deployment

ROUND_ORDERS = ["measure", "fold", "apply", "persist"]


# ---- 1: rank or trainer of a cluster ---------------------------------------------------------------------------------


def test_row_1_rank_or_trainer(deployment: Deployment) -> None:
    """Its open push is aborted, the lease is kept; the rank is started anew, pulls and goes on."""
    joined = len(deployment.marks(deployment.timeline("east"), "joined"))
    push = deployment.hold_push("east", ["ps1"])
    deployment.kill_rank("east")
    deployment.seen_after(deployment.master_timeline, "push_dropped", push=push)
    deployment.lanes["ps1"].heal()
    deployment.progress(2, by=deployment.clusters)
    assert len(deployment.marks(deployment.timeline("east"), "joined")) == joined
    assert push not in _folded(deployment)


# ---- 2: cluster, agent or link ---------------------------------------------------------------------------------------


def test_row_2_cluster_dies_with_an_uncommitted_push(deployment: Deployment) -> None:
    """The push is dropped with its lease; the window goes on without it."""
    since, push = time.time(), deployment.hold_push("east", ["ps1"])
    deployment.kill_agent("east")
    deployment.lanes["ps1"].heal()
    deployment.progress(3, by=("west",))
    deployment.seen_after(deployment.master_timeline, "cluster_gone", since=since, cluster="east")
    assert push not in _folded(deployment)
    deployment.cluster("east")


def test_row_2_cluster_dies_with_a_committed_push(deployment: Deployment) -> None:
    """The work is good and counts, though nobody is left to learn of it."""
    trap = deployment.orders["ps0"].calls.trap("measure")
    trap.caught()
    committed = deployment.marks(deployment.master_timeline, "push_committed")[-1]["push"]
    cluster = committed.split("/")[0]
    deployment.kill_agent(cluster)
    trap.release()
    deployment.until(lambda: committed in _folded(deployment), SEEN_S, f"{committed} counts")
    deployment.cluster(cluster)


# ---- 3: cluster comes back -------------------------------------------------------------------------------------------


def test_row_3_cluster_comes_back(deployment: Deployment) -> None:
    """A new incarnation pulls the head and takes part, at once: it need not wait for the old lease to end."""
    before = deployment.wait_for_status(lambda s: "east" in s["clusters"], SEEN_S, "the master knows east")["clusters"][
        "east"
    ]["inc"]
    since = time.time()
    deployment.kill_agent("east")
    deployment.cluster("east")
    deployment.progress(2, by=("east",))
    assert deployment.seen_after(deployment.timeline("east"), "joined", since=since)["inc"] == before + 1


# ---- 4: frame corrupt, truncated, repeated, hostile ------------------------------------------------------------------


def test_row_4_frames_are_corrupt(deployment: Deployment) -> None:
    """One bit of every 20 kB towards the slaves is wrong: it is refused, asked again, and never enters a version.

    The deployment checks at the end that every version is the reference's number: one wrong bit would show.
    """
    for lane in deployment.lanes.values():
        lane.flip(20_000)
    flipped = lambda: sum(lane.flipped for lane in deployment.lanes.values())  # noqa: E731
    deployment.until(lambda: flipped() >= 40, 60, "40 bits are flipped")
    for lane in deployment.lanes.values():
        lane.heal()
    deployment.progress(2, by=deployment.clusters)


def test_row_4_frames_are_hostile(deployment: Deployment) -> None:
    """Garbage, half greetings and endless claims on every port: the run goes on, nobody is taken for dead."""
    since = time.time()
    pids, rng = [p.pid for p in deployment.processes if p.code is None], random.Random(4)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    long_frame = b"\x02" + (10 << 30).to_bytes(8, "big")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    hostile = [
        rng.randbytes(5000), greeting, greeting + ready + long_frame, preface + rng.randbytes(2000),
        greeting + ready + b"\x00\x40" + rng.randbytes(64), b"GET / HTTP/1.1\r\n\r\n",
        greeting + ready + (b"\x01\xff" + rng.randbytes(255)) * 2000,
    ]  # fmt: skip
    ports = [own[key] for own in deployment._own.values() for key in ("listen", "lane")] + [deployment.address]
    for words in hostile:
        for port in ports:
            _say(port, words)
    deployment.progress(3, by=deployment.clusters)
    assert [p.pid for p in deployment.processes if p.code is None] == pids
    for kind in ("cluster_gone", "slave_lost"):
        assert not [m for m in deployment.marks(deployment.master_timeline, kind) if m["at"] > since]


# ---- 5: slave before Persisted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ROUND_ORDERS)
def test_row_5_slave_before_persisted(deployment: Deployment, order: str) -> None:
    """The round is skipped; its clusters keep their progress, so the next push brings more; the slave comes back."""
    since, skipped = time.time(), len(deployment.skipped())
    trap = deployment.orders["ps1"].calls.trap(order)
    trap.caught()
    deployment.process("ps1").kill()
    trap.release(forward=False)
    deployment.start_slave("ps1")
    deployment.until(lambda: len(deployment.skipped()) > skipped, SEEN_S, "the round is skipped")
    deployment.progress(2, by=deployment.clusters)
    lost = deployment.seen_after(deployment.master_timeline, "round_skipped", since=since)
    folds = [f for r in deployment.history() if r.round > int(lost["round"]) for f in r.folds]
    assert any(f.tokens >= 4 * TOKENS[f.push.cluster] for f in folds), "nobody carried its progress on"


# ---- 6: slave after Persisted ----------------------------------------------------------------------------------------


def test_row_6_slave_after_persisted(deployment: Deployment) -> None:
    """The row is there, the slave dies before it gets Commit: it comes back with the version, no round is skipped."""
    skipped = len(deployment.skipped())
    trap = deployment.orders["ps1"].calls.trap("commit")
    trap.caught()
    head = deployment.head()
    deployment.process("ps1").kill()
    trap.release(forward=False)
    deployment.start_slave("ps1")
    deployment.progress(2, by=deployment.clusters)
    assert len(deployment.skipped()) == skipped and head in deployment.lineage()


def test_row_6_slave_in_doubt(deployment: Deployment) -> None:
    """It has prepared and persisted, and is cut off before Commit: it keeps both, and asks when it registers."""
    since, skipped = time.time(), len(deployment.skipped())
    pid = deployment.process("ps1").pid
    trap = deployment.orders["ps1"].calls.trap("commit")
    trap.caught()
    head = deployment.head()
    for wire in deployment.wires("ps1"):
        wire.hold()
    deployment.seen_after(deployment.master_timeline, "slave_lost", since=since, slave="ps1")
    for wire in deployment.wires("ps1"):
        wire.heal()
    trap.release(forward=False)
    deployment.progress(2, by=deployment.clusters)
    assert (
        len(deployment.skipped()) == skipped and head in deployment.lineage() and deployment.process("ps1").pid == pid
    )


# ---- 9: master -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["open_push", *ROUND_ORDERS])
def test_row_9_master_before_the_row(deployment: Deployment, order: str) -> None:
    """A new term; that round made no version; everybody is known again, and no cluster stopped computing."""
    trap = deployment.orders["ps0"].calls.trap(order)
    trap.caught()
    head = deployment.head()
    deployment.process("master").kill()
    trap.release(forward=False)
    deployment.start_master()
    deployment.progress(2, by=deployment.clusters)
    assert head in deployment.lineage()


def test_row_9_master_after_the_row(deployment: Deployment) -> None:
    """The row stands and nobody knows of it: the next master repeats Commit, and answers Outcomes from the ledger."""
    skipped = len(deployment.skipped())
    traps = [deployment.orders[name].calls.trap("commit") for name in deployment.slaves]
    for trap in traps:
        trap.caught()
    head = deployment.head()
    deployment.process("master").kill()
    for trap in traps:
        trap.release(forward=False)
    deployment.start_master()
    deployment.progress(2, by=deployment.clusters)
    assert head in deployment.lineage() and len(deployment.skipped()) == skipped


# ---- 10: master not looking ------------------------------------------------------------------------------------------


def test_row_10_master_not_looking(deployment: Deployment) -> None:
    """Stopped for three leases: it says Blind, moves every deadline, and evicts nobody."""
    since, pid = time.time(), deployment.process("master").pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3 * LEASE_S)  # the gap itself is what is tested
    os.kill(pid, signal.SIGCONT)
    deployment.seen_after(deployment.master_timeline, "blind", since=since)
    deployment.progress(2, by=deployment.clusters)
    for kind in ("cluster_gone", "slave_lost"):
        assert not [m for m in deployment.marks(deployment.master_timeline, kind) if m["at"] > since]


# ---- 12: partition; more of it in test_partitions.py -----------------------------------------------------------------


def test_row_12_partition(deployment: Deployment) -> None:
    """A cluster is cut off from the master: the others go on; healed, a new incarnation takes part.

    Control and data at once: test_namespaces.py. The deployment checks at the end what became of its tokens.
    """
    since = time.time()
    deployment.to_master["east"].wire.hold()
    deployment.seen_after(deployment.master_timeline, "cluster_gone", since=since, cluster="east")
    deployment.progress(3, by=("west",))
    deployment.to_master["east"].wire.heal()
    deployment.progress(2, by=deployment.clusters)


# ---- words -----------------------------------------------------------------------------------------------------------


def _folded(deployment: Deployment) -> set[str]:
    return {str(f.push) for r in deployment.history() for f in r.folds}


def _say(port: str, words: bytes) -> None:
    host, number = port.rsplit(":", 1)
    with socket.create_connection((host, int(number)), 5) as s:
        s.settimeout(0.2)
        try:
            s.sendall(words)
            s.recv(64)
        except OSError:
            pass  # it hung up on us, or waits for more: either is right
