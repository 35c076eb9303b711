"""The judge of liveness: leases, hung trainers, and a master that was not looking (docs/rationale.md#12, #24)."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from dips.ids import PushId
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.events import ClusterSilent, PushStaged, SlaveSilent, TokensReported, TrainerChanged, TransferAwaited
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.membership import Judge
from dips.protocol.options import TimingOptions
from dips.protocol.transfer_book import Bandwidth

TIMING = TimingOptions(heartbeat_s=2.0, lease_heartbeats=5, hang_s=60.0)


def heartbeat(
    cluster: str = "a",
    inc: int = 1,
    steps: int = 0,
    trainer: TrainerState = TrainerState.TRAINING,
    activity: Activity = Activity.INNER,
    moved: int = 0,
    total: int = 0,
) -> ClusterHeartbeat:
    return ClusterHeartbeat(
        cluster, inc, trainer, activity, 1, steps, 70, 30, 0.0, None, moved, total, 0.0, tokens_consumed=100,
        newest_protocol=0,
    )  # fmt: skip


def test_a_lease_ends_after_five_heartbeats_of_silence_and_is_said_once() -> None:
    """Silence of a whole lease is death; the tokens that it carried are known from its last heartbeat."""
    judge = Judge(TIMING)
    judge.welcome_cluster("a", 1, 0.0)
    judge.on_cluster_heartbeat(heartbeat(), 3.0)
    assert judge.next_deadline() == 13.0
    assert judge.judge_silence(12.9) == []
    assert judge.judge_silence(13.0) == [ClusterSilent("a", 1, 10.0, 100, 30)]
    assert judge.judge_silence(99.0) == []


def test_who_comes_first_is_looked_at() -> None:
    """A judge that had nobody to judge slept until somebody came."""
    for welcome in ("welcome_cluster", "welcome_slave"):
        judge = Judge(TIMING)
        assert judge.next_deadline() == inf
        getattr(judge, welcome)("a", 1, 3.0)
        assert judge.next_deadline() == 13.0


def test_a_blind_master_evicts_nobody() -> None:
    """After a stall of 30 s the leases move by 30 s."""
    judge = Judge(TIMING)
    judge.welcome_cluster("a", 1, 0.0)
    judge.welcome_slave("s", 1, 0.0)
    judge.skip_gap(30.0)
    assert judge.judge_silence(39.0) == []
    assert judge.judge_silence(40.0) == [ClusterSilent("a", 1, 10.0, 0), SlaveSilent("s", 1, 10.0)]


def test_heartbeats_of_an_older_incarnation_are_not_heard() -> None:
    """Invariant 5: a zombie's heartbeat renews nothing."""
    judge = Judge(TIMING)
    judge.welcome_cluster("a", 2, 0.0)
    judge.on_cluster_heartbeat(heartbeat(inc=1), 9.0)
    assert [type(v) for v in judge.judge_silence(10.0)] == [ClusterSilent]


def test_a_hung_trainer_is_told_from_a_slow_one() -> None:
    """Heartbeats without inner steps for hang_s: not moving; a step later: moving again. Waiting for a window is no
    hang.
    """
    judge = Judge(TIMING)
    judge.welcome_cluster("a", 1, 0.0)
    for now in range(2, 60, 2):
        assert judge.on_cluster_heartbeat(heartbeat(steps=1), float(now)) == []
    judge.on_cluster_heartbeat(heartbeat(steps=1), 61.0)
    assert judge.on_cluster_heartbeat(heartbeat(steps=1), 62.0) == [
        TrainerChanged("a", 1, False, "its trainer hangs: no inner step seen for 60 s")
    ]
    assert judge.on_cluster_heartbeat(heartbeat(steps=2), 63.0) == [TrainerChanged("a", 1, True, "training")]
    for now in range(64, 200, 2):
        assert judge.on_cluster_heartbeat(heartbeat(steps=2, activity=Activity.WINDOW), float(now)) == []


def test_progress_counts_as_incarnation_during_a_long_transfer() -> None:
    """Bytes that move are a sign of life however long they take; bytes that stand still for hang_s are a hang, reported
    apart.
    """
    judge = Judge(TIMING)
    judge.welcome_cluster("a", 1, 0.0)
    for now in range(2, 400, 2):
        assert (
            judge.on_cluster_heartbeat(heartbeat(steps=2, activity=Activity.PUSH, moved=now, total=1000), float(now))
            == []
        )
    stuck = heartbeat(steps=2, activity=Activity.PUSH, moved=398, total=1000)
    assert [judge.on_cluster_heartbeat(stuck, 398.0 + s) for s in (2, 30, 59)] == [[], [], []]
    hung = TrainerChanged("a", 1, False, "its trainer hangs: no byte of its transfer seen for 60 s")
    assert judge.on_cluster_heartbeat(stuck, 458.0) == [hung]
    moved = heartbeat(steps=2, activity=Activity.PUSH, moved=399, total=1000)
    assert judge.on_cluster_heartbeat(moved, 460.0) == [TrainerChanged("a", 1, True, "training")]


def test_a_transfer_that_waits_for_its_turn_is_no_hang() -> None:
    """Before its first byte and after its last a cluster waits for others, not they for it."""
    judge = Judge(TIMING)
    judge.welcome_cluster("a", 1, 0.0)
    for now in range(2, 300, 2):
        assert (
            judge.on_cluster_heartbeat(heartbeat(steps=2, activity=Activity.PULL, moved=0, total=1000), float(now))
            == []
        )
    for now in range(300, 600, 2):
        assert (
            judge.on_cluster_heartbeat(heartbeat(steps=2, activity=Activity.PUSH, moved=1000, total=1000), float(now))
            == []
        )


def test_a_dead_trainer_is_said_at_once() -> None:
    """An agent that heartbeats for a dead trainer keeps its lease, and no window waits for it."""
    judge = Judge(TIMING)
    judge.welcome_cluster("a", 1, 0.0)
    assert judge.on_cluster_heartbeat(heartbeat(trainer=TrainerState.DEAD), 1.0) == [
        TrainerChanged("a", 1, False, "its trainer died")
    ]


def test_what_lies_staged_is_repeated_with_every_heartbeat() -> None:
    """A lost Staged heals with the next heartbeat."""
    judge = Judge(TIMING)
    judge.welcome_slave("s", 4, 0.0)
    push = PushId("a", 1, 3)
    said = judge.on_slave_heartbeat(SlaveHeartbeat("s", 4, 1, None, (push,), (), 0, 0, 0, 0, 0.0, 0.0), 1.0)
    assert said == [PushStaged("s", 4, push, 0)]


def test_the_last_words_of_a_incarnation_are_what_its_heartbeats_told() -> None:
    """Asked before the next incarnation of its name begins; nothing is known of a name that never joined."""
    judge = Judge(TIMING)
    judge.welcome_cluster("a", 1, 0.0)
    judge.on_cluster_heartbeat(heartbeat(), 1.0)
    assert judge.report_tokens("a") == [TokensReported("a", 1, 100, 30)]
    assert judge.report_tokens("b") == []


def test_a_slow_step_is_no_hang() -> None:
    """A trainer whose inner steps take ten minutes has not hung after one of them, whatever hang_s says."""
    judge = Judge(TIMING)
    judge.welcome_cluster("a", 1, 0.0)
    slow = replace(heartbeat(steps=3), step_s=600.0)
    for now in range(1, 3000, 2):
        assert judge.on_cluster_heartbeat(slow, float(now)) == []
        assert judge.judge_silence(float(now)) == []
    (hung,) = judge.on_cluster_heartbeat(slow, 3001.0)
    assert isinstance(hung, TrainerChanged) and not hung.moving and "3000 s" in hung.reason


def test_what_a_cluster_comes_to_is_told_at_once_and_then_now_and_then() -> None:
    """A quarter of least_transfer_s apart, while its trainer trains: one that hangs or died keeps nothing open."""
    judge = Judge(TimingOptions(least_transfer_s=40.0, hang_s=60.0))
    judge.welcome_cluster("a", 1, 0.0)
    open_ = replace(heartbeat(steps=1), transfer_seq=3)
    told = TransferAwaited("a", 1, 3)
    assert judge.on_cluster_heartbeat(heartbeat(steps=1), 1.0) == []
    assert judge.on_cluster_heartbeat(open_, 2.0) == [told]
    assert judge.on_cluster_heartbeat(open_, 11.9) == []
    assert judge.on_cluster_heartbeat(open_, 12.0) == [told]
    assert judge.on_cluster_heartbeat(replace(open_, transfer_seq=4), 13.0) == [TransferAwaited("a", 1, 4)]
    (hung,) = judge.on_cluster_heartbeat(open_, 61.0)
    assert isinstance(hung, TrainerChanged)
    assert judge.on_cluster_heartbeat(open_, 90.0) == []


def test_a_bandwidth_is_told_again_when_it_has_changed_by_more_than_a_twentieth() -> None:
    """A twentieth alone tells the Coordinator nothing."""
    assert Bandwidth(mean=1.05e6, reported=1e6).measure_rate(1.05e6) is None
    assert Bandwidth(mean=1.06e6, reported=1e6).measure_rate(1.06e6) == 1.06e6
    assert Bandwidth(mean=0.94e6, reported=1e6).measure_rate(0.94e6) == 0.94e6


def test_how_long_nobody_was_heard_of_is_a_lease_at_most() -> None:
    """So a rival is let in at once where nobody lives, and after a lease at the latest."""
    judge = Judge(TIMING)
    for welcome, heard_s in ((judge.welcome_cluster, judge.heard_s), (judge.welcome_slave, judge.slave_heard_s)):
        assert heard_s("a", 5.0) == 10.0
        welcome("a", 1, 5.0)
        assert [heard_s("a", now) for now in (8.0, 15.0, 99.0)] == [3.0, 10.0, 10.0]
    judge.forget_cluster("a")
    assert (judge.heard_s("a", 5.0), judge.slave_heard_s("a", 5.0)) == (10.0, 0.0), "it left: its name is free"


def test_a_join_that_is_repeated_renews_no_lease() -> None:
    """Only heartbeats do, and only an incarnation that is newer begins anew."""
    judge = Judge(TIMING)
    for now in (0.0, 5.0):
        judge.welcome_cluster("a", 1, now)
    assert judge.heard_s("a", 6.0) == 6.0
    judge.welcome_cluster("a", 2, 6.0)
    assert judge.heard_s("a", 6.0) == 0.0
