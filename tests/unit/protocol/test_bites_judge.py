"""The judge of liveness believes nobody but the present incarnation, and judges at the moment that it names."""

from __future__ import annotations

from dataclasses import replace

from dips.ids import GENESIS, PushId
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.events import ClusterSilent, MirrorReport, MirrorReported, PushStaged, SlaveSilent, TrainerChanged
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.membership import Judge
from dips.protocol.options import TimingOptions

TIMING = TimingOptions(heartbeat_s=2.0, lease_heartbeats=5, hang_s=8.0)
LEASE_S = TIMING.lease_s
PUSH = PushId("a", 2, 1)


def of_cluster(inc: int, inner_steps: int = 0) -> ClusterHeartbeat:
    return ClusterHeartbeat(
        "a", inc, TrainerState.TRAINING, Activity.INNER, 1, inner_steps, 0, 0, 0.0, GENESIS, 0, 0, 0.0
    )


def of_slave(sinc: int) -> SlaveHeartbeat:
    return SlaveHeartbeat("s", sinc, 1, GENESIS, (PUSH,), (), 0, 0, 0, 0, 0.0, 0.0)


def known(inc: int = 2) -> Judge:
    """Cluster `a` and slave `s` in their second incarnation, since time 0."""
    judge = Judge(TIMING)
    judge.welcome_cluster("a", inc, 0.0)
    judge.welcome_slave("s", inc, 0.0)
    return judge


def test_a_heartbeat_of_an_old_incarnation_of_a_cluster_keeps_no_lease() -> None:
    """A process that was thought dead and speaks again does not speak for its successor."""
    judge = known()
    assert judge.on_cluster_heartbeat(of_cluster(1, inner_steps=5), LEASE_S - 1) == []
    assert ClusterSilent in [type(e) for e in judge.judge_silence(LEASE_S)]


def test_a_heartbeat_of_an_old_incarnation_of_a_slave_keeps_no_lease() -> None:
    """And what lies staged there lies nowhere."""
    judge = known()
    assert judge.on_slave_heartbeat(of_slave(1), LEASE_S - 1) == []
    assert SlaveSilent in [type(e) for e in judge.judge_silence(LEASE_S)]


def test_one_of_the_present_incarnation_does() -> None:
    judge = known()
    judge.on_cluster_heartbeat(of_cluster(2, inner_steps=5), LEASE_S - 1)
    assert judge.on_slave_heartbeat(of_slave(2), LEASE_S - 1) == [PushStaged("s", 2, PUSH, 0)]
    assert not [e for e in judge.judge_silence(LEASE_S) if not isinstance(e, TrainerChanged)]


def test_silence_is_judged_when_the_lease_ends() -> None:
    """At `next_deadline` there is a verdict: a shell that sleeps until then must not find nothing and spin."""
    judge = known()
    assert judge.judge_silence(TIMING.hang_s - 0.01) == []
    assert judge.next_deadline() == TIMING.hang_s
    assert [type(e) for e in judge.judge_silence(TIMING.hang_s)] == [TrainerChanged]
    assert judge.next_deadline() == LEASE_S
    assert [type(e) for e in judge.judge_silence(LEASE_S)] == [ClusterSilent, SlaveSilent]


def test_a_gap_moves_every_lease_and_every_hang() -> None:
    """Nobody was listening for an hour: everybody has what was left before."""
    judge = known()
    judge.skip_gap(3600.0)
    assert judge.judge_silence(3600.0 + TIMING.hang_s - 0.01) == []
    assert [type(e) for e in judge.judge_silence(3600.0 + TIMING.hang_s)] == [TrainerChanged]
    assert [type(e) for e in judge.judge_silence(3600.0 + LEASE_S)] == [ClusterSilent, SlaveSilent]


def test_a_slave_that_registers_again_is_heard() -> None:
    """Under its incarnation, as after a change of masters' connections: its lease begins anew."""
    judge = known()
    judge.welcome_slave("s", 2, LEASE_S - 1)
    assert SlaveSilent not in [type(e) for e in judge.judge_silence(LEASE_S)]
    assert SlaveSilent in [type(e) for e in judge.judge_silence(2 * LEASE_S - 1)]


def test_what_a_mirror_holds_is_told_when_it_is_news() -> None:
    """Heartbeats repeat it; a slave without a mirror has nothing to tell."""
    judge, now = known(), 1.0
    held, failing = MirrorReport((GENESIS,)), MirrorReport((GENESIS,), "its disk is full")
    for mirror, news in ((None, []), (held, [held]), (held, []), (failing, [failing]), (failing, [])):
        told = judge.on_slave_heartbeat(replace(of_slave(2), mirror=mirror), now)
        assert [e.report for e in told if isinstance(e, MirrorReported)] == news
