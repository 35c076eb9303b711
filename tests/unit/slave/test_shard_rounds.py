"""Rounds that end otherwise: poisoned, aborted, in doubt, on a disk that fails; and snapshots written beside."""

from __future__ import annotations

import numpy as np
import pytest

from dips.errors import (
    Busy,
    BusyDisk,
    FailedDisk,
    LocalProtocolError,
    Stale,
    StaleVersion,
)
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer_step import nesterov_step
from dips.protocol.effects import (
    Abort,
    Apply,
    Commit,
    DropPush,
    Fold,
    Hold,
    LoadVersion,
    Measure,
    OpenPull,
    OpenPush,
    OrderBody,
    Persist,
    Ping,
    Reorder,
    Retire,
)
from dips.protocol.events import Done, Folded, Persisted
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import Manifest
from dips.slave.ports import Released, SourceMoved, Staged
from dips.slave.shard import Followed, Unfollowed
from tests.loading import follow_load
from tests.unit.slave.shard_rig import P1, P2, P3, PULL, V1, ShardRig, read_prepared


@pytest.mark.parametrize(
    ("body", "what"),
    [(Fold(1, P2, 1.0), "Fold of x/1#2"), (Apply(1, V1, nesterov_step(1.0, 1.0, 0.0)), "Apply of v1@r1")],
)
def test_failure_4_a_swallowed_error(body: OrderBody, what: str) -> None:
    """After a kernel failed, every order of the round is refused but Abort; then the next round works."""
    slave = ShardRig().ready()
    slave.fold(P1, 0.5)
    slave.stage(P2, 0.25)
    slave.order(Measure(1, P2, GENESIS))
    del slave.shard.versions._acc.arrays[2]  # type: ignore[union-attr]  # the second layer fails, after the first
    with pytest.raises(LocalProtocolError, match=f"{what} failed"):
        slave.order(body)
    for body in (Fold(1, P2, 1.0), Apply(1, V1, nesterov_step(1.0, 1.0, 0.0)), Measure(1, P1, GENESIS)):
        with pytest.raises(LocalProtocolError, match="only Abort is legal"):
            slave.order(body)
    slave.order(DropPush(P2, ""))
    assert slave.shard.versions.open_pushes == ()
    assert slave.order(Abort(1, "poisoned")) == Done()
    assert slave.shard.rounds.poison is None
    assert slave.shard.versions.used_bytes == 2 * 28


def test_a_full_disk_is_found_before_anything_is_computed() -> None:
    """Apply reserves the snapshot's room first; without room it changes nothing and is legal again
    (docs/rationale.md#21)."""
    slave = ShardRig().ready()
    slave.fold(P1, 0.5)
    before, slave.disk.full = slave.shard.versions.bank_holders(), True
    with pytest.raises(FailedDisk, match=r"has no room for the snapshot of v1@r1.*no space left"):
        slave.order(Apply(1, V1, nesterov_step(1.0, 1.0, 0.0)))
    assert slave.shard.versions.bank_holders() == before
    assert read_prepared(slave.order(Apply(1, V1, nesterov_step(1.0, 1.0, 0.0), reserve=False))) == V1
    slave.order(Commit(V1, ()))
    assert slave.shard.versions.served_version == V1


def test_the_layer_of_buffers_is_averaged() -> None:
    """The manifest says which it is: in a round of two pushes it becomes their mean, the parameters take the step."""
    shapes = [("a.0.w", (2, 3)), ("b.w", (4,)), ("c.bias", (1,))]
    slave = ShardRig(manifest=Manifest.from_shapes(shapes, Grouping(share_buffers=("*.bias",)))).ready()
    slave.fold(P1, 2.0)
    slave.fold(P2, 6.0, weight=3.0)
    slave.order(Apply(1, V1, nesterov_step(0.25, 0.5, 0.0)))
    slave.order(Commit(V1, ()))
    theta = slave.shard.versions.theta(V1)
    assert theta[2].tolist() == [5.0] and theta[0].tolist() == [3.0] * 6


def test_a_failed_persist_leaves_what_is_prepared() -> None:
    """A disk that fails while it writes costs the snapshot; the master decides whether the version goes with it."""
    slave = ShardRig().ready()
    version = slave.prepare(persist=False)
    slave.disk.error = OSError(5, "Input/output error")
    with pytest.raises(FailedDisk, match=r"cannot write the snapshot of v1@r1.*Input/output"):
        slave.order(Persist(version))
    slave.order(Commit(version, ()))
    assert slave.order(Persist(version)) == Persisted(version, "digest of v1@r1")


def test_what_is_written_beside_is_not_taken_away() -> None:
    """While the served version's snapshot is being written, pushes go on; Apply and Load wait
    (docs/protocol.md#memory)."""
    slave = ShardRig().ready()
    first = slave.prepare(persist=False)
    slave.order(Commit(first, ()))
    order = slave.made(Persist(first))
    write = slave.shard.begin_disk_order(order)
    assert callable(write)
    slave.fold(P2, 0.25, round_=2)
    second = VersionId(2, 2)
    with pytest.raises(Busy, match=r"Apply of v2@r2 waits: the snapshot of v1@r1 is being written"):
        slave.order(Apply(2, second, nesterov_step(1.0, 1.0, 0.0)))
    assert isinstance(follow_load(slave.shard, GENESIS), Unfollowed)
    assert "Load of v0@r0 waits" in slave.shard.reason
    answer = write()
    assert answer == Persisted(first, "digest of v1@r1")
    slave.shard.end_disk_order(order, answer)
    assert (slave.shard.begin_disk_order(order), slave.disk.writes) == (answer, 1)
    assert read_prepared(slave.order(Apply(2, second, nesterov_step(1.0, 1.0, 0.0)))) == second


def test_what_is_aborted_while_it_is_written_stays_until_its_writer_has_noticed() -> None:
    """Its banks are no one else's before; Measure and Fold of the next round go on, its Apply waits [invariant 11]."""
    slave = ShardRig().ready()
    version = slave.prepare(persist=False)
    order = slave.made(Persist(version))
    write = slave.shard.begin_disk_order(order)
    assert callable(write)
    slave.order(Abort(1, "another slave was lost"))
    assert slave.shard.versions.prepared is None
    slave.fold(P2, 0.25, round_=2)
    with pytest.raises(Busy, match="the snapshot of v1@r1 is being written"):
        slave.order(Apply(2, VersionId(1, 2), nesterov_step(1.0, 1.0, 0.0)))
    assert slave.shard.versions.used_bytes <= slave.shard.versions.limit_bytes
    with pytest.raises(Stale, match="wanted no more") as failed:
        write()
    with pytest.raises(Stale):
        slave.shard.end_disk_order(order, failed.value)
    assert read_prepared(slave.order(Apply(2, VersionId(1, 2), nesterov_step(1.0, 1.0, 0.0)))) == VersionId(1, 2)
    assert len(slave.shard.versions.bank_holders()) == 4, "theta, m, and what is prepared of them"
    assert version not in slave.disk.kept


def test_a_version_is_committed_while_it_is_written() -> None:
    """Its row did not wait for this disk: it is served, and what is written of it stays as it is."""
    slave = ShardRig().ready()
    version = slave.prepare(persist=False)
    order = slave.made(Persist(version))
    write = slave.shard.begin_disk_order(order)
    assert callable(write)
    assert slave.order(Commit(version, ())) == Done()
    slave.shard.end_disk_order(order, write())
    assert slave.disk.kept[version][0] == {i: a.tobytes() for i, a in slave.shard.versions.theta(version).items()}


def test_a_load_ends_the_writer_of_what_was_prepared() -> None:
    """The round is over at the master: the load is tried again when the writer has noticed."""
    slave = ShardRig().ready()
    version = slave.prepare(persist=False)
    order = slave.made(Persist(version))
    write = slave.shard.begin_disk_order(order)
    assert callable(write)
    other, part = VersionId(1, 9), {0: bytes(4 * 6), 2: bytes(4)}
    slave.disk.kept[other] = (part, part)
    slave.welcome(LoadVersion(other))
    assert isinstance(follow_load(slave.shard, other), Unfollowed)
    with pytest.raises(Stale) as failed:
        write()
    with pytest.raises(Stale):
        slave.shard.end_disk_order(order, failed.value)
    assert follow_load(slave.shard, other) is Followed.DONE
    assert slave.shard.versions.served_version == other


def test_a_snapshot_that_failed_beside_holds_nobody_up() -> None:
    """After a writer that failed the next Apply is legal, and a later Persist is a new one."""
    slave = ShardRig().ready()
    first = slave.prepare(persist=False)
    slave.order(Commit(first, ()))
    slave.disk.error = OSError(28, "No space left on device")
    order = slave.made(Persist(first))
    write = slave.shard.begin_disk_order(order)
    assert callable(write)
    with pytest.raises(FailedDisk, match="No space left") as failed:
        write()
    with pytest.raises(FailedDisk):
        slave.shard.end_disk_order(order, failed.value)
    assert slave.order(Persist(first)) == Persisted(first, "digest of v1@r1")
    slave.prepare(P2, 2)


def test_the_end_of_an_old_masters_writer_is_not_remembered() -> None:
    """Its number may be given again by the next master (invariant 5)."""
    slave = ShardRig().ready()
    first = slave.prepare(persist=False)
    slave.order(Commit(first, ()))
    order = slave.made(Persist(first))
    write = slave.shard.begin_disk_order(order)
    assert callable(write)
    slave.welcome(Hold(), term=2)
    slave.shard.end_disk_order(order, write())
    slave.term, slave.number = 2, order.number - 1
    assert slave.order(Ping()) == Done()


def test_an_apply_waits_for_the_room_of_what_is_being_deleted() -> None:
    """A full disk that is about to have room costs no round; one that has none does."""
    slave = ShardRig().ready()
    slave.fold(P1, 0.5)
    slave.disk.kept[VersionId(7, 7)] = ({}, {})
    slave.disk.full = True
    retire, apply = slave.made(Retire((VersionId(7, 7),))), Apply(1, V1, nesterov_step(1.0, 1.0, 0.0))
    delete = slave.shard.begin_disk_order(retire)
    assert callable(delete)
    with pytest.raises(Busy, match="waits for the room of those that are being deleted"):
        slave.order(apply)
    slave.shard.end_disk_order(retire, delete())
    with pytest.raises(FailedDisk, match="no room for the snapshot of v1@r1"):
        slave.order(apply)
    slave.disk.full = False
    assert read_prepared(slave.order(apply)) == V1
    assert slave.disk.kept == {}


def test_room_is_given_back_with_the_round() -> None:
    """What was reserved for a version that never came to be is free again; for one that is served it waits."""
    slave = ShardRig().ready()
    version = slave.prepare(persist=False)
    assert slave.disk.reserved == {version: 2 * 4 * slave.shard.versions.numel}
    slave.order(Abort(1, "a slave was lost"))
    assert slave.disk.reserved == {}
    second = slave.prepare(P2, 2, persist=False)
    slave.order(Commit(second, ()))
    assert list(slave.disk.reserved) == [second]
    slave.prepare(P3, 3, persist=False)
    assert list(slave.disk.reserved) == [VersionId(2, 3)]


def test_abort_keeps_what_was_not_folded() -> None:
    """A staged and a moving push survive the round's end; they are measured anew in the next."""
    slave = ShardRig(slots=2).ready()
    slave.fold(P1, 0.5)
    slave.stage(P2, 0.25)
    slave.order(Measure(1, P2, GENESIS))
    slave.order(OpenPush(PushId("y", 1, 1), 1, 1.0))
    slave.order(Abort(1, "skipped"))
    assert slave.shard.versions.open_pushes == (P2, PushId("y", 1, 1))
    with pytest.raises(LocalProtocolError, match="was not measured in round 2"):
        slave.order(Fold(2, P2, 1.0))
    slave.order(Measure(2, P2, GENESIS))
    assert slave.order(Fold(2, P2, 1.0)) == Folded((6 * 0.75**2, 0.75**2))


def test_a_later_round_presumes_the_earlier_aborted() -> None:
    """If the Abort got lost, the first order of the next round drops what the earlier one had folded (invariant 4)."""
    slave = ShardRig().ready()
    slave.fold(P1, 0.5, round_=1)
    slave.fold(P2, 0.25, round_=2)
    slave.order(Apply(2, VersionId(1, 2), nesterov_step(1.0, 1.0, 0.0)))
    np.testing.assert_array_equal(slave.shard.versions.theta(VersionId(1, 2))[2], [0.25])


def test_an_apply_makes_the_version_after_the_served_one_of_its_own_round() -> None:
    """Any other name would be a second content of a version, or a hole in the lineage (guards invariant 1)."""
    slave = ShardRig().ready()
    slave.fold(P1, 0.5, round_=2)
    for wrong in (VersionId(1, 1), VersionId(2, 2), GENESIS):
        with pytest.raises(LocalProtocolError, match=f"Apply of {wrong} in round 2 cannot follow v0@r0"):
            slave.order(Apply(2, wrong, nesterov_step(1.0, 1.0, 0.0)))
    assert slave.shard.versions.prepared is None and not slave.disk.reserved
    slave.order(Apply(2, VersionId(1, 2), nesterov_step(1.0, 1.0, 0.0)))


def test_a_round_that_was_aborted_does_not_begin_again() -> None:
    """Also one that never began here: an order for it, or for an earlier one, came late."""
    slave = ShardRig(slots=1).ready()
    slave.order(Abort(3, "skipped"))
    slave.order(Abort(2, "a late one"))
    slave.stage(P1, 0.5)
    for over in (1, 2, 3):
        with pytest.raises(Stale, match=f"round {over} is over; the last one at s was 3"):
            slave.order(Measure(over, P1, GENESIS))
    slave.order(Measure(4, P1, GENESIS))


def test_what_was_measured_in_a_round_that_is_over_is_staged_again() -> None:
    """Heartbeats name it, and the next round measures it anew before it is folded."""
    slave = ShardRig().ready()
    slave.stage(P1, 0.5)
    slave.order(Measure(1, P1, GENESIS))
    assert slave.shard.transfers.staged == {}
    slave.order(Abort(1, "its slave was lost"))
    assert slave.shard.transfers.staged == {P1: None}
    slave.stage(P2, 0.0)
    slave.order(DropPush(P2, "over"))
    assert slave.shard.transfers.staged == {P1: None}
    with pytest.raises(LocalProtocolError, match="was not measured in round 2"):
        slave.order(Fold(2, P1, 1.0))
    slave.order(Measure(2, P1, GENESIS))
    slave.order(Fold(2, P1, 1.0))
    assert P1 not in slave.flow.pushes, "nothing is written any more into what is the sum now"


def test_no_version_is_left_while_it_is_written() -> None:
    """The head's late snapshot begins when the next version is prepared: θ and m stay until it is on the disk."""
    slave = ShardRig().ready()
    slave.order(Commit(slave.prepare(P1, persist=False), ()))
    version = slave.prepare(P2, 2, persist=False)
    order = slave.made(Persist(V1))
    write = slave.shard.begin_disk_order(order)
    assert callable(write)
    with pytest.raises(BusyDisk, match="Commit of v2@r2 waits"):
        slave.order(Commit(version, ()))
    slave.shard.end_disk_order(order, write())
    assert slave.order(Commit(version, ())) == Done() and slave.shard.versions.served_version == version


def test_room_that_is_written_into_is_not_given_back() -> None:
    """It is the snapshot's; what is reserved and not written goes with the next round."""
    slave = ShardRig().ready()
    slave.prepare(P1)
    assert list(slave.disk.reserved) == [V1]
    slave.order(Abort(1, "skipped"))
    assert list(slave.disk.reserved) == [V1], "its writer has used it"
    slave.prepare(P2, 2, persist=False)
    slave.order(Abort(2, "skipped"))
    assert list(slave.disk.reserved) == [V1]


def test_a_reader_whose_snapshot_came_late_moves_before_the_next_version() -> None:
    """At the flip there was no file of it yet; then it leaves its bank to θ′."""
    slave = ShardRig(slots=1, pinned=0).ready()
    slave.order(Commit(slave.prepare(P1, persist=False), (PULL,)))
    slave.prepare(P2, 2, persist=False)
    slave.order(Commit(VersionId(2, 2), ()))
    assert slave.flow.moving == []
    slave.disk.kept[V1] = ({0: bytes(24), 2: bytes(4)},) * 2
    slave.fold(P3, 0.5, 3)
    apply = slave.made(Apply(3, VersionId(3, 3), nesterov_step(1.0, 1.0, 0.0)))
    with pytest.raises(Busy):
        slave.shard.execute_order(apply)
    assert slave.flow.moving == [PULL]
    slave.shard.transfers.on_flow_event(SourceMoved(PULL))
    assert read_prepared(slave.shard.execute_order(apply)) == VersionId(3, 3)


def test_a_slave_in_doubt_enters_no_round() -> None:
    """With a prepared version neither committed nor aborted, no other round begins; it is kept
    (docs/rationale.md#1)."""
    slave = ShardRig().ready()
    version = slave.prepare()
    slave.stage(P2, 0.5)
    with pytest.raises(LocalProtocolError, match="neither committed nor aborted"):
        slave.order(Measure(2, P2, GENESIS))
    assert slave.shard.versions.prepared == version


def test_a_slave_that_serves_what_it_shall_load_forgets_its_open_round() -> None:
    """Its process has lived on while it was believed lost: what it had folded belongs to a round that was given up."""
    slave = ShardRig().ready()
    slave.fold(P1, 0.5)
    slave.welcome(LoadVersion(GENESIS))
    assert follow_load(slave.shard, GENESIS) is Followed.DONE
    assert not slave.shard.versions.folded and slave.shard.rounds.number is None


def test_abort_of_a_committed_round_is_an_assertion() -> None:
    """A round with a row is never aborted; a late Abort of an earlier round changes nothing."""
    slave = ShardRig().ready()
    slave.order(Commit(slave.prepare(P1, 2), ()))
    with pytest.raises(LocalProtocolError, match="committed as v1@r2"):
        slave.order(Abort(2, ""))
    slave.fold(P2, 0.5, round_=3)
    slave.order(Abort(1, "late"))
    assert slave.shard.versions.folded


def test_commit_of_a_version_already_served_is_harmless() -> None:
    """A Commit that is sent again under a new number opens what is missing and changes nothing else."""
    slave = ShardRig().ready()
    version = slave.prepare()
    slave.order(Commit(version, (PULL,)))
    assert slave.order(Commit(version, (PULL, PullId("y", 1, 1)))) == Done()
    assert sorted(slave.flow.pulls) == [PULL, PullId("y", 1, 1)]


def test_apply_waits_for_a_reader() -> None:
    """Busy for Apply poisons nothing: the same order succeeds when the old reader is done."""
    slave = ShardRig(slots=1, pinned=0).ready()
    slave.order(OpenPull(PULL, GENESIS))
    slave.order(Commit(slave.prepare(P1, 1), ()))
    slave.fold(P2, 0.25, round_=2)
    slave.order(OpenPush(P3, 1, 60.0))
    order = slave.made(Apply(2, VersionId(2, 2), nesterov_step(1.0, 1.0, 0.0)))
    with pytest.raises(Busy):
        slave.shard.execute_order(order)
    assert slave.shard.rounds.poison is None
    slave.shard.transfers.on_flow_event(Released(PULL, "done"))
    assert read_prepared(slave.shard.execute_order(order)) == VersionId(2, 2)


def test_apply_moves_slow_readers_to_the_snapshot_file() -> None:
    """A version too many in memory gives its bank up to θ′: its readers read the same bytes from its file
    (docs/rationale.md#19).

    The bank is free when the flow says that nothing of it is in flight, not before (guards invariant 11).
    """
    slave = ShardRig(slots=1, pinned=0).ready()
    slave.order(Commit(slave.prepare(P1, 1), ()))
    slave.order(OpenPull(PULL, V1))
    held = {i: a.tobytes() for i, a in slave.flow.pulls[PULL].items()}
    slave.order(Commit(slave.prepare(P2, 2), ()))
    assert slave.flow.moving == [PULL]
    assert {i: a.tobytes() for i, a in slave.flow.pulls[PULL].items()} == held
    slave.fold(P3, 0.25, round_=3)
    order = slave.made(Apply(3, VersionId(3, 3), nesterov_step(1.0, 1.0, 0.0)))
    slave.order(OpenPush(PushId("y", 1, 1), 1, 60.0))
    with pytest.raises(Busy, match="older θ v1@r1"):
        slave.shard.execute_order(order)
    slave.shard.transfers.on_flow_event(SourceMoved(PULL))
    assert read_prepared(slave.shard.execute_order(order)) == VersionId(3, 3)
    assert slave.shard.versions.held.pins == {PULL: V1}
    assert slave.flow.moving == [PULL]


def test_reorder_reaches_a_push_that_moves_and_nothing_else() -> None:
    """Legal any time; a push that is staged, dropped or unknown has nothing to be ordered."""
    slave = ShardRig().ready()
    slave.order(OpenPush(P1, 1, 60.0))
    assert slave.order(Reorder(P1, (3,))) == Done()
    assert slave.order(Reorder(P1, (1,))) == Done()
    assert slave.order(Reorder(P2, (2,))) == Done()
    assert slave.flow.places == {P1: (1,)}
    slave.shard.transfers.on_flow_event(Staged(P1, 28))
    slave.order(Reorder(P1, (7,)))
    assert slave.flow.places == {P1: (1,)}


def test_one_older_version_stays_in_memory() -> None:
    """With one pinned, the oldest of two older versions is moved and the newer one keeps its bank."""
    slave = ShardRig(pinned=1).ready()
    slave.order(Commit(slave.prepare(P1, 1), (PULL,)))
    slave.order(Commit(slave.prepare(P2, 2), (PullId("y", 1, 1),)))
    assert slave.flow.moving == []
    slave.order(Commit(slave.prepare(P3, 3), ()))
    assert slave.flow.moving == [PULL]
    assert slave.shard.versions.held.older_versions == (VersionId(2, 2),)


def test_a_version_without_a_file_keeps_its_bank_and_the_next_one_moves() -> None:
    """v0@r0 was never written, so its reader stays; the younger version is moved in its place."""
    slave = ShardRig(pinned=1).ready()
    slave.order(OpenPull(PullId("z", 1, 1), GENESIS))
    slave.order(Commit(slave.prepare(P1, 1), (PULL,)))
    slave.order(Commit(slave.prepare(P2, 2), ()))
    assert slave.flow.moving == [PULL]
    slave.shard.transfers.on_flow_event(SourceMoved(PULL))
    assert slave.shard.versions.held.pins == {PULL: V1, PullId("z", 1, 1): GENESIS}


def test_a_late_reader_of_an_older_version_is_served_from_its_file() -> None:
    """An OpenPull that a flip overtook costs no bank; a version that is prepared and not committed is never served."""
    slave = ShardRig().ready()
    slave.order(Commit(slave.prepare(P1, 1), ()))
    slave.order(Commit(slave.prepare(P2, 2), ()))
    used = slave.shard.versions.used_bytes
    slave.order(OpenPull(PULL, V1))
    assert slave.shard.versions.used_bytes == used
    assert slave.shard.versions.held.pins == {PULL: V1}
    prepared = slave.prepare(P3, 3)
    with pytest.raises(StaleVersion):
        slave.order(OpenPull(PullId("y", 1, 1), prepared))
    slave.shard.transfers.on_flow_event(Released(PULL, "done"))
    assert slave.shard.versions.held.pins == {}
