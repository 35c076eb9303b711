"""SIGKILL, and SIGSTOP with SIGCONT, of every role, in the middle of a living run.

What is true after any of them is checked at the end of each test by its house (conftest.py): each cluster takes part in
new versions, θ is the reference's number wherever it is, the tokens add up, nobody's log names a bug of ours.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.chaos.house import LEASE_S, SEEN_S, Deployment

STOPPED_S = 2 * LEASE_S


def test_sigkill_of_the_master(house: Deployment) -> None:
    """Nobody else stops; the next incarnation takes up where the ledger ends."""
    lives = {name: house.process(name).pid for name in (*house.slaves, *house.clusters)}
    house.process("master").kill()
    house.start_master()
    house.progress(2, by=house.clusters)
    assert {name: house.process(name).pid for name in lives} == lives
    assert all(house.process(name).code is None for name in lives)


def test_sigkill_of_a_slave(house: Deployment) -> None:
    """Its next incarnation loads the head; the house checks at the end that no version and no token went with it."""
    house.process("ps0").kill()
    house.start_slave("ps0")
    house.progress(2, by=house.clusters)


def test_sigkill_of_both_slaves(house: Deployment) -> None:
    """The disks alone know θ; the house checks at the end that it is the one of the ledger."""
    for name in house.slaves:
        house.process(name).kill()
    house.start_slaves()
    house.progress(2, by=house.clusters)


def test_sigkill_of_an_agent(house: Deployment) -> None:
    """The others go on; the house checks at the end that the new incarnation is counted apart from the old one."""
    house.kill_agent("east")
    house.progress(2, by=("west",))
    house.cluster("east")
    house.progress(2, by=house.clusters)


def test_sigkill_of_an_agent_that_is_back_within_its_lease(house: Deployment) -> None:
    """The incarnation that is fenced by the next one had lost the work of dead ranks: that stays counted."""
    for _ in range(3):
        _lose_work(house, "east")
    told = house.wait_for_status(
        lambda s: s["clusters"]["east"]["tokens_lost"] > 0, SEEN_S, "tokens are lost with the ranks"
    )
    house.kill_agent("east")
    house.cluster("east")
    house.progress(2, by=("east",))
    now = house.wait_for_status(lambda s: "east" in s["clusters"], SEEN_S, "the master knows east")
    assert now["clusters"]["east"]["tokens_lost"] >= told["clusters"]["east"]["tokens_lost"]


def test_sigkill_of_the_master_and_then_of_an_agent(house: Deployment) -> None:
    """Only the dead master had heard of the tokens that the dead agent lost: the next agent still knows them."""
    _lose_work(house, "east")
    told = house.wait_for_status(
        lambda s: s["clusters"]["east"]["tokens_lost"] > 0, SEEN_S, "tokens are lost with the rank"
    )
    house.process("master").kill()
    house.kill_agent("east")
    house.start_master()
    house.cluster("east")
    house.progress(2, by=("east",))
    lost = told["clusters"]["east"]["tokens_lost"]
    house.wait_for_status(
        lambda s: s["clusters"]["east"]["tokens_lost"] >= lost, SEEN_S, f"{lost} tokens of east are lost"
    )


def test_sigkill_of_a_training_job(house: Deployment) -> None:
    """Launcher and rank: the agent starts them anew and keeps the lease."""
    joined = len(house.marks(house.timeline("east"), "joined"))
    house.kill_trainer("east")
    house.progress(2, by=house.clusters)
    assert len(house.marks(house.timeline("east"), "joined")) == joined


def test_sigkill_of_a_rank(house: Deployment) -> None:
    """Its launcher starts it anew; the house checks at the end that its lost steps are told as lost."""
    house.kill_rank("east")
    house.progress(2, by=house.clusters)


def test_sigkill_of_everything(house: Deployment) -> None:
    """The whole room: what the ledger names is on the disks, and the run goes on from it."""
    head = house.head()
    for name in house.clusters:
        house.kill_agent(name)
    for name in ("master", *house.slaves):
        house.process(name).kill()
    house.start()
    assert house.progress(2, by=house.clusters) > head


@pytest.mark.parametrize("who", ["ps0", "east"])
def test_sigstop_beyond_the_lease_and_sigcont(house: Deployment, who: str) -> None:
    """Slave or agent: lost or gone, the others are told so; awake again it finds out by its first heartbeat."""
    since, pid = time.time(), house.process(who).pid
    os.kill(pid, signal.SIGSTOP)
    kind, key = ("slave_lost", "slave") if who == "ps0" else ("cluster_gone", "cluster")
    house.seen_after(house.master_timeline, kind, since=since, **{key: who})
    os.kill(pid, signal.SIGCONT)
    house.progress(2, by=house.clusters)
    assert house.process(who).code is None


def test_sigstop_of_a_rank_and_sigcont(house: Deployment) -> None:
    """It hangs while its agent lives: no incarnation ends, no window waits longer than its length."""
    gone = len(house.marks(house.master_timeline, "cluster_gone"))
    ranks = house.ranks("east")
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    house.progress(4, by=("west",))
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    house.progress(2, by=house.clusters)
    assert len(house.marks(house.master_timeline, "cluster_gone")) == gone


def test_sigstop_of_the_master_and_sigcont(house: Deployment) -> None:
    """Silence counts only while somebody listens: nobody is judged by the gap."""
    before = [len(house.marks(house.master_timeline, kind)) for kind in ("cluster_gone", "slave_lost")]
    pid = house.process("master").pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)  # the gap itself is what is tested
    os.kill(pid, signal.SIGCONT)
    house.progress(2, by=house.clusters)
    assert house.marks(house.master_timeline, "blind")
    assert [len(house.marks(house.master_timeline, kind)) for kind in ("cluster_gone", "slave_lost")] == before


def test_sigstop_of_everything_and_sigcont(house: Deployment) -> None:
    """A machine that sleeps and wakes: all clocks jump; the house checks at the end that only time was lost."""
    pids = [p.pid for p in house.processes if p.code is None] + [
        r for name in house.clusters for r in house.ranks(name)
    ]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    house.progress(2, by=house.clusters)


def _lose_work(house: Deployment, name: str) -> None:
    """A rank dies when its cluster asks for a push: what that would have brought lies in the rank alone."""
    ask = house.to_master[name].calls.trap("RequestPush")
    ask.caught()
    house.kill_rank(name)
    ask.release()
    house.progress(1, by=(name,))
