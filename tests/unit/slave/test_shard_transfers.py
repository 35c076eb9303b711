"""Slots, tombstones, pins, and what a heartbeat heals."""

from __future__ import annotations

import pytest

from dips.codecs import Codec
from dips.errors import (
    Busy,
    FailedDisk,
    RemoteProtocolError,
    StalePush,
    StaleVersion,
    UnreadSnapshot,
)
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.protocol.effects import (
    ClosePull,
    Commit,
    DropPush,
    Hold,
    LoadVersion,
    OpenPull,
    OpenPush,
    RankKeys,
)
from dips.protocol.events import Done, Pinned
from dips.protocol.heartbeats import LiveTransfers, SlaveHeartbeatAnswer
from dips.protocol.order import MAX_RANKS
from dips.slave.ports import PushOver, Released, Staged
from dips.slave.shard import Followed
from dips.store.version import digest_of
from tests.loading import follow_load
from tests.unit.slave.shard_rig import P1, P2, P3, PULL, V1, WHO, ShardRig

# ---- tombstones and slots --------------------------------------------------------------------------------------------


def test_a_late_open_push_finds_a_tombstone() -> None:
    """What was dropped, even before it came, or folded, is never opened again; a newer one is (guards invariant 11)."""
    slave = ShardRig().ready()
    slave.order(DropPush(P2, "its OpenPush is still on its way"))
    for push in (P1, P2):
        with pytest.raises(StalePush, match="at or below"):
            slave.order(OpenPush(push, 1, 1.0))
    slave.fold(P3, 0.5)
    with pytest.raises(StalePush):
        slave.order(OpenPush(P3, 1, 1.0))
    assert slave.shard.versions.open_pushes == ()
    slave.order(OpenPush(PushId("x", 2, 1), 1, 1.0))
    assert slave.shard.versions.open_pushes == (PushId("x", 2, 1),)
    slave.order(ClosePull(PULL))
    with pytest.raises(StalePush):
        slave.order(OpenPull(PULL, GENESIS))


@pytest.mark.parametrize("ranks", [0, MAX_RANKS + 1])
def test_the_ranks_of_a_push_are_bounded(ranks: int) -> None:
    """Each has a place in the line: an absurd number would be a table as large."""
    slave = ShardRig().ready()
    with pytest.raises(RemoteProtocolError, match="expected 1 to"):
        slave.order(OpenPush(P1, ranks, 1.0))
    assert slave.shard.versions.open_pushes == ()


def test_no_slot_is_busy_and_nothing_is_taken() -> None:
    """A push beyond the slots is answered Busy; the order may be tried again under the same number."""
    slave = ShardRig(slots=1).ready()
    slave.order(OpenPush(P1, 1, 1.0))
    order = slave.made(OpenPush(P2, 1, 1.0))
    with pytest.raises(Busy):
        slave.shard.execute_order(order)
    slave.order(DropPush(P1, ""))
    assert slave.shard.execute_order(order) == Done()


def test_a_push_that_the_flow_does_not_take_leaves_no_slot() -> None:
    """If the flow refuses to open a push or pull, no slot and no pin remains."""
    slave = ShardRig().ready()
    slave.flow.broken = True
    for body in (OpenPush(P1, 1, 1.0), OpenPull(PULL, GENESIS)):
        with pytest.raises(RemoteProtocolError):
            slave.order(body)
    assert slave.shard.versions.open_pushes == ()
    assert slave.shard.versions.held.pins == {}


def test_an_open_push_is_opened_once_and_reported_again() -> None:
    """A new master's OpenPush of a push that lies here staged changes nothing, and is reported to the master again."""
    slave = ShardRig().ready()
    slave.stage(P1, 0.5)
    slave.shard.take_reports()
    assert slave.order(OpenPush(P1, 1, 1.0)) == Done()
    assert slave.shard.versions.open_pushes == (P1,)
    assert [r.push for r in slave.shard.take_reports()] == [P1]


def test_a_lossy_push_begins_as_its_base_and_no_flip_changes_that() -> None:
    """Its slot is θ of the base from the start, so the head may flip while it moves, and nobody waits for a pin."""
    slave = ShardRig(pinned=0).ready()
    assert slave.order(OpenPush(P2, 1, 60.0, Codec.INT8, GENESIS)) == Done()
    assert slave.flow.codecs[P2] is Codec.INT8
    version = slave.prepare(P1)
    slave.order(Commit(version, ()))
    assert slave.shard.versions.served_version == version
    assert all((a == 1.0).all() for a in slave.flow.pushes[P2].values())
    assert slave.shard.versions.held.pins == {}


def test_a_lossy_push_on_a_version_that_is_not_held_is_refused_and_takes_nothing() -> None:
    """An OpenPush that a flip overtook finds its base gone: the master drops the push, the slave holds no slot."""
    slave = ShardRig().ready()
    before = slave.state()
    with pytest.raises(StaleVersion, match="v7@r9 is not held"):
        slave.order(OpenPush(P1, 1, 60.0, Codec.INT8, VersionId(7, 9)))
    assert slave.state() == before


def test_an_open_push_keeps_its_codec() -> None:
    """A new master that grants the same push otherwise than the old one is refused: the slot holds another base."""
    slave = ShardRig().ready()
    slave.order(OpenPush(P1, 1, 60.0, Codec.INT8, GENESIS))
    with pytest.raises(StalePush, match="is open as int8 on v0@r0, not fp32 on None"):
        slave.order(OpenPush(P1, 1, 60.0))
    assert slave.order(OpenPush(P1, 1, 60.0, Codec.INT8, GENESIS)) == Done()


def test_a_refused_push_frees_its_slot_and_is_told() -> None:
    """When the flow gives a push up, its slot is free, its tombstone set, and the master is to learn why."""
    slave = ShardRig().ready()
    slave.order(OpenPush(P1, 1, 1.0))
    slave.shard.transfers.on_flow_event(PushOver(P1, "ranges leave a gap"))
    assert slave.shard.versions.open_pushes == ()
    assert slave.shard.take_reports() == [PushOver(P1, "ranges leave a gap")]
    slave.shard.transfers.on_flow_event(Staged(P1, 28))
    slave.shard.transfers.on_flow_event(PushOver(P1, "again"))
    assert slave.shard.take_reports() == []


# ---- pulls and healing -----------------------------------------------------------------------------------------------


def test_a_pin_ends_when_the_flow_says_released() -> None:
    """ClosePull alone unpins nothing: libzmq may still read (guards invariant 11, docs/rationale.md#8)."""
    slave = ShardRig().ready()
    slave.order(OpenPull(PULL, GENESIS))
    slave.order(ClosePull(PULL))
    assert slave.shard.versions.held.pins == {PULL: GENESIS}
    slave.shard.transfers.on_flow_event(Released(PULL, "closed"))
    assert slave.shard.versions.held.pins == {}
    with pytest.raises(StalePush):
        slave.order(OpenPull(PULL, GENESIS))


def test_a_pull_is_of_one_version_and_opened_once() -> None:
    """Of another one, or as long as its readers have not ended, its name is refused: nobody would know what is read."""
    slave = ShardRig().ready()
    slave.order(OpenPull(PULL, GENESIS))
    assert slave.order(OpenPull(PULL, GENESIS)) == Done()
    slave.order(Commit(slave.prepare(P1), ()))
    with pytest.raises(StalePush, match=r"x/1\^1 is open on v0@r0, not v1@r1"):
        slave.order(OpenPull(PULL, V1))
    slave.order(ClosePull(PULL))
    with pytest.raises(StalePush):
        slave.order(OpenPull(PULL, GENESIS))
    assert not slave.flow.pulls


def test_a_version_of_the_number_that_is_served_is_not_served_from_a_file() -> None:
    """Its name is another: it was rolled back, and is on the disk still."""
    slave = ShardRig().ready()
    slave.order(Commit(slave.prepare(P1), ()))
    slave.disk.kept[VersionId(1, 0)] = slave.disk.kept[V1]
    with pytest.raises(StaleVersion, match="v1@r0 is not held"):
        slave.order(OpenPull(PULL, VersionId(1, 0)))


def test_a_commit_opens_its_pulls_once() -> None:
    """A repetition by a new master opens neither what is open nor what is over, and needs as many keys as pulls."""
    slave, other, new = ShardRig().ready(), PullId("y", 1, 1), PullId("z", 1, 1)
    version = slave.prepare(P1)
    keys = (RankKeys(("k",)), RankKeys(()))
    with pytest.raises(RemoteProtocolError, match="keys of 1 pulls for 2"):
        slave.order(Commit(version, (PULL, other), keys[:1]))
    assert slave.order(Commit(version, (PULL, other), keys)) == Done()
    assert list(slave.flow.pulls) == [PULL, other]
    slave.order(ClosePull(other))
    slave.shard.transfers.on_flow_event(Released(other, "closed"))
    assert slave.order(Commit(version, (PULL, other, new))) == Done()
    assert list(slave.flow.pulls) == [PULL, new]


def test_a_pull_that_the_flow_gave_up_is_over() -> None:
    """It stalled: nothing of it is held, and the master, who sees that its cluster goes on, may open it again."""
    slave = ShardRig().ready()
    slave.order(OpenPull(PULL, GENESIS))
    slave.shard.transfers.on_flow_event(Released(PULL, "nothing moved"))
    assert slave.shard.transfers.pulls == {} and slave.shard.versions.held.pins == {}
    assert slave.order(OpenPull(PULL, GENESIS)) == Done()


def test_who_only_reads_has_the_file_and_no_bank() -> None:
    """Of the head, too; without a file it is pinned as others are, so that v0@r0 and late snapshots are to be had."""
    slave, reader = ShardRig().ready(), PullId("eval.puller", 1, 1)
    slave.order(OpenPull(reader, GENESIS))
    held = slave.shard.versions.held
    assert held.head is not None and held.head.pulls == {reader}
    slave.disk.kept[GENESIS] = ({i: a.tobytes() for i, a in held.head.bank.arrays.items()}, {})
    later = PullId("eval.puller", 1, 2)
    slave.order(OpenPull(later, GENESIS))
    assert held.pins == {reader: GENESIS, later: GENESIS} and held.head.pulls == {reader}
    slave.order(ClosePull(later))
    slave.shard.transfers.on_flow_event(Released(later, "closed"))
    assert held.pins == {reader: GENESIS}
    slave.order(OpenPull(PULL, GENESIS))
    assert held.head.pulls == {reader, PULL}, "a cluster is served from memory"


def test_an_archive_is_served_after_it_was_read_and_not_if_it_is_damaged() -> None:
    """A slave that was restarted has verified its newest versions only; what is rotten never reaches a file."""
    rig = ShardRig().ready()
    zero = {0: bytes(24), 2: bytes(4)}
    rig.disk.kept, rig.disk.unread = {V1: (zero, zero), VersionId(2, 2): (zero, zero)}, {V1}
    rig.welcome(LoadVersion(VersionId(2, 2)))
    assert follow_load(rig.shard, VersionId(2, 2)) is Followed.DONE
    with pytest.raises(UnreadSnapshot):
        rig.shard.execute_order(rig.made(OpenPull(PULL, V1)))
    assert not rig.flow.pulls
    assert rig.order(OpenPull(PULL, V1)) == Done()
    assert {layer: array.tobytes() for layer, array in rig.flow.pulls[PULL].items()} == zero
    rig.disk.unread = {V1}
    rig.disk.kept = {VersionId(2, 2): rig.disk.kept[VersionId(2, 2)]}  # damaged, as reading it shows
    with pytest.raises(StaleVersion):
        rig.order(OpenPull(PullId("x", 1, 2), V1))
    assert rig.shard.make_registration(WHO).unread == ()


@pytest.mark.parametrize("momentum", [False, True])
def test_a_disk_that_cannot_be_listed_refuses_a_pull_as_a_disk_that_fails(momentum: bool) -> None:
    """Whoever pulls an older version hears of that disk, and not of a bug in Di-PS; the next pull is served."""
    rig = ShardRig().ready()
    rig.disk.kept = {V1: ({0: bytes(24), 2: bytes(4)},) * 2, VersionId(2, 2): ({0: bytes(24), 2: bytes(4)},) * 2}
    rig.disk.unread = {V1}
    rig.welcome(LoadVersion(VersionId(2, 2)))
    assert follow_load(rig.shard, VersionId(2, 2)) is Followed.DONE
    rig.disk.error = OSError(5, "Input/output error")
    with pytest.raises(FailedDisk, match=r"whether v1@r1 is on the disk.*Input/output error"):
        rig.order(OpenPull(PULL, V1, momentum=momentum))
    assert not rig.flow.pulls and not rig.shard.versions.held.pins
    rig.order(OpenPull(PULL, V1, momentum=momentum))
    assert rig.flow.pulls.keys() == {PULL}


def test_heal_drops_what_the_master_does_not_list() -> None:
    """Only what an order up to as_of opened is dropped; what a later order opened stays (docs/rationale.md#13)."""
    slave = ShardRig(slots=2).ready()
    slave.stage(P1, 0.5)
    slave.order(OpenPull(PULL, GENESIS))
    as_of = slave.number
    slave.order(OpenPush(PushId("y", 1, 1), 1, 1.0))
    assert (
        slave.shard.drop_unlisted(SlaveHeartbeatAnswer(1, 10.0, False, as_of, LiveTransfers(1, (P1,), (PULL,)))) == []
    )
    assert slave.shard.drop_unlisted(SlaveHeartbeatAnswer(1, 10.0, True, as_of, LiveTransfers(1, (), ()))) == []
    assert slave.shard.drop_unlisted(SlaveHeartbeatAnswer(1, 10.0, False, as_of, LiveTransfers(1, (), ()))) == [
        "x/1#1",
        "x/1^1",
    ]
    assert slave.shard.versions.open_pushes == (PushId("y", 1, 1),)
    assert slave.flow.closing == [PULL]
    with pytest.raises(StalePush):
        slave.order(OpenPush(P1, 1, 1.0))


def test_heal_counts_from_the_last_order_that_opened() -> None:
    """What is opened again is known to lists from that order on, and to the list of just that order."""
    slave = ShardRig(slots=2).ready()
    slave.order(OpenPush(P1, 1, 1.0))
    slave.order(OpenPull(PULL, GENESIS))
    before = slave.number
    slave.order(OpenPull(PULL, GENESIS))
    slave.order(OpenPush(P1, 1, 1.0))
    drop = lambda as_of: slave.shard.drop_unlisted(  # noqa: E731
        SlaveHeartbeatAnswer(1, 10.0, False, as_of, LiveTransfers(1, (), ()))
    )
    assert drop(before) == []
    assert drop(slave.number) == ["x/1#1", "x/1^1"]


def test_heal_by_a_new_master_drops_what_the_old_one_opened() -> None:
    """A new term knows none of the old term's transfers unless it lists them; an old term's answer is ignored."""
    slave = ShardRig().ready()
    slave.stage(P1, 0.5)
    slave.welcome(Hold(), term=2)
    assert slave.shard.drop_unlisted(SlaveHeartbeatAnswer(1, 10.0, False, 99, LiveTransfers(1, (), ()))) == []
    assert slave.shard.drop_unlisted(SlaveHeartbeatAnswer(2, 10.0, False, 0, LiveTransfers(1, (), ()))) == ["x/1#1"]


def test_momentum_is_served_from_the_snapshot_with_digests() -> None:
    """m of a version on the disk, and the digests of θ and m of each layer; of one that is not there nothing."""
    slave, reader = ShardRig().ready(), PullId("copy.puller", 1, 1)
    prepared = slave.prepare()
    slave.order(Commit(prepared, ()))
    answer = slave.order(OpenPull(reader, prepared, momentum=True))
    assert slave.shard.versions.held.pins == {reader: prepared}
    theta, momentum = slave.shard.versions.theta(prepared), slave.shard.versions.momentum(prepared)
    assert answer == Pinned(tuple(digest_of(part[i]) for i in theta for part in (theta, momentum)))
    assert {i: a.tobytes() for i, a in slave.flow.pulls[reader].items()} == {
        i: a.tobytes() for i, a in momentum.items()
    }
    assert slave.order(OpenPull(reader, prepared, momentum=True)) == answer, "a master that restarted asks again"
    slave.order(ClosePull(reader))
    slave.shard.transfers.on_flow_event(Released(reader, "it is over"))
    with pytest.raises(StaleVersion, match="no snapshot of it"):
        slave.order(OpenPull(PullId("copy.puller", 1, 2), VersionId(9, 9), momentum=True))
