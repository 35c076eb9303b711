"""SIGKILL, and SIGSTOP with SIGCONT, of every role, in the middle of a living run.

What is true after any of them is checked at the end of each test by its deployment (conftest.py): each cluster takes
part in new versions, θ is the reference's number wherever it is, the tokens add up, nobody's log names a bug of ours.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.chaos.deployment import LEASE_S, SEEN_S, Deployment

DEPLOYMENT = {"secure": True}
STOPPED_S = 2 * LEASE_S


def test_sigkill_of_the_master(deployment: Deployment) -> None:
    """Nobody else stops; the next incarnation takes up where the ledger ends."""
    lives = {name: deployment.process(name).pid for name in (*deployment.slaves, *deployment.clusters)}
    deployment.process("master").kill()
    deployment.start_master()
    deployment.progress(2, by=deployment.clusters)
    assert {name: deployment.process(name).pid for name in lives} == lives
    assert all(deployment.process(name).code is None for name in lives)


def test_sigkill_of_a_slave(deployment: Deployment) -> None:
    """Its next incarnation loads the head; the deployment checks at the end that no version and no token is lost."""
    deployment.process("ps0").kill()
    deployment.start_slave("ps0")
    deployment.progress(2, by=deployment.clusters)


def test_sigkill_of_both_slaves(deployment: Deployment) -> None:
    """The disks alone know θ; the deployment checks at the end that it is the one of the ledger."""
    for name in deployment.slaves:
        deployment.process(name).kill()
    deployment.start_slaves()
    deployment.progress(2, by=deployment.clusters)


def test_sigkill_of_an_agent(deployment: Deployment) -> None:
    """The others go on; the deployment checks at the end that the new incarnation is counted apart from the old one."""
    deployment.kill_agent("east")
    deployment.progress(2, by=("west",))
    deployment.cluster("east")
    deployment.progress(2, by=deployment.clusters)


def test_sigkill_of_an_agent_that_is_back_within_its_lease(deployment: Deployment) -> None:
    """The incarnation that is fenced by the next one had lost the work of dead ranks: that stays counted."""
    for _ in range(3):
        _lose_work(deployment, "east")
    status = deployment.wait_for_status(
        lambda s: s["clusters"]["east"]["tokens_lost"] > 0, SEEN_S, "tokens are lost with the ranks"
    )
    deployment.kill_agent("east")
    deployment.cluster("east")
    deployment.progress(2, by=("east",))
    now = deployment.wait_for_status(lambda s: "east" in s["clusters"], SEEN_S, "the master knows east")
    assert now["clusters"]["east"]["tokens_lost"] >= status["clusters"]["east"]["tokens_lost"]


def test_sigkill_of_the_master_and_then_of_an_agent(deployment: Deployment) -> None:
    """Only the dead master knew of the tokens that the dead agent lost: the next agent still knows them."""
    _lose_work(deployment, "east")
    status = deployment.wait_for_status(
        lambda s: s["clusters"]["east"]["tokens_lost"] > 0, SEEN_S, "tokens are lost with the rank"
    )
    deployment.process("master").kill()
    deployment.kill_agent("east")
    deployment.start_master()
    deployment.cluster("east")
    deployment.progress(2, by=("east",))
    lost = status["clusters"]["east"]["tokens_lost"]
    deployment.wait_for_status(
        lambda s: s["clusters"]["east"]["tokens_lost"] >= lost, SEEN_S, f"{lost} tokens of east are lost"
    )


def test_sigkill_of_a_training_job(deployment: Deployment) -> None:
    """Launcher and rank: the agent starts them anew and keeps the lease."""
    joined = len(deployment.marks(deployment.timeline("east"), "joined"))
    deployment.kill_trainer("east")
    deployment.progress(2, by=deployment.clusters)
    assert len(deployment.marks(deployment.timeline("east"), "joined")) == joined


def test_sigkill_of_a_rank(deployment: Deployment) -> None:
    """Its launcher starts it anew; the deployment checks at the end that its lost steps are reported as lost."""
    deployment.kill_rank("east")
    deployment.progress(2, by=deployment.clusters)


def test_sigkill_of_everything(deployment: Deployment) -> None:
    """The whole room: what the ledger names is on the disks, and the run goes on from it."""
    head = deployment.head()
    for name in deployment.clusters:
        deployment.kill_agent(name)
    for name in ("master", *deployment.slaves):
        deployment.process(name).kill()
    deployment.start_all()
    assert deployment.progress(2, by=deployment.clusters) > head


@pytest.mark.parametrize("who", ["ps0", "east"])
def test_sigstop_beyond_the_lease_and_sigcont(deployment: Deployment, who: str) -> None:
    """Slave or agent: lost or gone, the others learn of it; awake again it finds out by its first heartbeat."""
    since, pid = time.time(), deployment.process(who).pid
    os.kill(pid, signal.SIGSTOP)
    kind, key = ("slave_lost", "slave") if who == "ps0" else ("cluster_gone", "cluster")
    deployment.seen_after(deployment.master_timeline, kind, since=since, **{key: who})
    os.kill(pid, signal.SIGCONT)
    deployment.progress(2, by=deployment.clusters)
    assert deployment.process(who).code is None


def test_sigstop_of_a_rank_and_sigcont(deployment: Deployment) -> None:
    """It hangs while its agent lives: no incarnation ends, no window waits longer than its length."""
    gone = len(deployment.marks(deployment.master_timeline, "cluster_gone"))
    ranks = deployment.ranks("east")
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    deployment.progress(4, by=("west",))
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    deployment.progress(2, by=deployment.clusters)
    assert len(deployment.marks(deployment.master_timeline, "cluster_gone")) == gone


def test_sigstop_of_the_master_and_sigcont(deployment: Deployment) -> None:
    """Silence counts only while somebody listens: nobody is judged by the gap."""
    before = [len(deployment.marks(deployment.master_timeline, kind)) for kind in ("cluster_gone", "slave_lost")]
    pid = deployment.process("master").pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)  # the gap itself is what is tested
    os.kill(pid, signal.SIGCONT)
    deployment.progress(2, by=deployment.clusters)
    assert deployment.marks(deployment.master_timeline, "blind")
    assert [
        len(deployment.marks(deployment.master_timeline, kind)) for kind in ("cluster_gone", "slave_lost")
    ] == before


def test_sigstop_of_everything_and_sigcont(deployment: Deployment) -> None:
    """A machine that sleeps and wakes: all clocks jump; the deployment checks at the end that only time was lost."""
    pids = [p.pid for p in deployment.processes if p.code is None] + [
        r for name in deployment.clusters for r in deployment.ranks(name)
    ]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    deployment.progress(2, by=deployment.clusters)


def _lose_work(deployment: Deployment, name: str) -> None:
    """A rank dies when its cluster asks for a push: what that would have brought lies in the rank alone."""
    ask = deployment.to_master[name].calls.trap("RequestPush")
    ask.caught()
    deployment.kill_rank(name)
    ask.release()
    deployment.progress(1, by=(name,))
