"""What a shard says of itself, and what it does with the answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dips.errors import (
    Busy,
    CorruptManifest,
    CorruptSnapshot,
    LocalProtocolError,
    RemoteProtocolError,
    StaleTerm,
    StaleVersion,
)
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer.versions import Versions
from dips.protocol.effects import (
    Abort,
    AbortVersion,
    Commit,
    CommitVersion,
    DropPush,
    Hold,
    LoadVersion,
    OpenPull,
    OpenPush,
    Persist,
    Ping,
    Registered,
    RegisterLater,
    Retire,
)
from dips.protocol.events import Done
from dips.slave.ports import Released
from dips.slave.shard import Followed, Unfollowed
from tests.loading import follow_load
from tests.unit.slave.shard_rig import MANIFEST, P1, P2, P3, PULL, V1, WHO, ShardRig


def test_registration_says_what_is_held() -> None:
    """A slave in doubt names memory, prepared and its snapshots, so that the master can decide by its row."""
    slave = ShardRig().ready()
    version = slave.prepare()
    said = slave.shard.make_registration(WHO)
    assert (said.memory, said.prepared, said.complete) == (GENESIS, version, (version,))
    assert (said.slave, said.term_seen, said.slots, said.reason) == ("s", 1, 2, "")
    assert (said.nonce, said.run, said.address, said.lanes) == ("nonce", "run", "h:1", ("h:2",))


@pytest.mark.parametrize(
    ("order", "memory"), [(CommitVersion(V1), V1), (LoadVersion(V1), V1), (AbortVersion(V1), GENESIS)]
)
def test_a_slave_in_doubt_is_told(order: CommitVersion | LoadVersion | AbortVersion, memory: VersionId) -> None:
    """Commit flips to what was prepared, Abort drops it; either way nothing is prepared afterwards."""
    slave = ShardRig().ready()
    slave.prepare()
    assert slave.shard.follow_order(order) is Followed.DONE
    assert (slave.shard.versions.served_version, slave.shard.versions.prepared) == (memory, None)
    assert slave.shard.reason == ""


def test_a_version_that_is_served_is_not_aborted_by_a_registration() -> None:
    """A Commit came between Register and its answer: the slave says what it serves, registers again and goes on."""
    slave = ShardRig().ready()
    slave.order(Commit(slave.prepare(P1, 1), ()))
    assert isinstance(followed := slave.shard.follow_order(AbortVersion(V1)), Unfollowed)
    assert "v1@r1 is committed and served here" in followed.reason
    assert slave.shard.versions.served_version == V1


def test_what_is_not_here_is_not_committed_by_a_registration() -> None:
    """The slave says so to its master, and serves on what it has."""
    slave = ShardRig().ready()
    assert isinstance(followed := slave.shard.follow_order(CommitVersion(V1)), Unfollowed)
    assert "v1@r1 is neither prepared nor served here" in followed.reason
    assert slave.shard.versions.served_version == GENESIS and slave.shard.versions.loading is None


def test_a_restarted_slave_loads_the_head_from_disk() -> None:
    """A new process has nothing before its order; then it holds the bytes that were persisted (guards 3 and 7)."""
    old = ShardRig().ready()
    version = old.prepare()
    old.order(Commit(version, ()))
    new = ShardRig(disk=old.disk)
    new.welcome(LoadVersion(version))
    with pytest.raises(StaleVersion):
        new.order(OpenPush(P1, 1, 1.0))
    follow_load(new.shard, version)
    for read in (Versions.theta, Versions.momentum):
        for layer in (0, 2):
            assert (
                read(new.shard.versions, version)[layer].tobytes() == read(old.shard.versions, version)[layer].tobytes()
            )


def test_a_load_that_fails_is_told_with_the_next_register() -> None:
    """A corrupt snapshot leaves what was held; the reason names the order, and a success clears it."""
    slave = ShardRig().ready()
    slave.disk.error = CorruptSnapshot("v4@r9/model.safetensors: expected xxh3-128 ..")
    assert isinstance(follow_load(slave.shard, VersionId(4, 9)), Unfollowed)
    assert slave.shard.reason.startswith("LoadVersion v4@r9: v4@r9/model.safetensors")
    assert slave.shard.versions.served_version == GENESIS
    assert slave.shard.follow_order(RegisterLater(1.0, "not now")) is Followed.WAITS
    assert slave.shard.reason
    assert slave.shard.follow_order(Hold()) is Followed.SERVES
    assert slave.shard.reason == ""


def test_orders_are_answered_while_a_snapshot_is_read() -> None:
    """What was served is served on; orders that need one version or the other wait, what is read is not deleted."""
    old = ShardRig().ready()
    first = old.prepare(P1, 1)
    old.order(Commit(first, ()))
    second = old.prepare(P2, 2)
    old.order(Commit(second, (PULL,)))
    order = LoadVersion(first)
    read = old.shard.follow_order(order)
    assert callable(read)
    assert old.order(Ping()) == old.order(DropPush(P3, "over")) == old.order(Abort(3, "it broke")) == Done()
    for body in (OpenPush(PushId("x", 1, 9), (0,), 1.0), OpenPull(PullId("x", 1, 9), second), Commit(second, ())):
        with pytest.raises(Busy, match=f"{type(body).__name__} waits: v1@r1 is being loaded"):
            old.order(body)
    with pytest.raises(Busy, match="Persist waits: v1@r1 is being loaded"):
        old.order(Persist(second))
    with pytest.raises(LocalProtocolError, match="Retire names v1@r1, which s serves, prepares or loads"):
        old.order(Retire((first,)))
    read()
    assert old.shard.versions.served_version == second
    assert old.shard.end_load(order, None) is Followed.DONE
    assert old.shard.versions.served_version == first
    assert old.order(Retire((second,))) == Done()
    assert tuple(old.disk.kept) == (first,)


def test_a_rollback_drops_pushes_and_closes_pulls() -> None:
    """Loading another version drops the round, every push and every pull; a reader keeps its bytes until released."""
    slave = ShardRig().ready()
    first = slave.prepare(P1, 1)
    slave.order(Commit(first, ()))
    second = slave.prepare(P2, 2)
    slave.order(Commit(second, (PULL,)))
    slave.stage(P3, 0.5)
    source = slave.flow.pulls[PULL]
    copy = source[0].copy()
    follow_load(slave.shard, first)
    assert slave.shard.versions.served_version == first
    assert slave.shard.versions.open_pushes == ()
    assert slave.flow.closing == [PULL]
    np.testing.assert_array_equal(source[0], copy)
    slave.shard.transfers.on_flow_event(Released(PULL, "closed"))
    assert slave.shard.versions.used_bytes == 2 * 28


def test_the_manifest_is_told_once() -> None:
    """A slave that knows it says its digest, and an answer without it is an answer; who knows none must be told."""
    slave = ShardRig()
    unknown = slave.shard.make_registration(WHO)
    told = Registered(1, 7, RegisterLater(1.0, "later"), GENESIS, (0, 2), ("", ""), MANIFEST.to_json())
    with pytest.raises(CorruptManifest, match="sent no manifest"):
        slave.shard.on_registered(replace(told, manifest=""))
    slave.shard.on_registered(told)
    known = slave.shard.make_registration(WHO)
    assert (unknown.manifest_digest, known.manifest_digest) == ("", MANIFEST.digest)
    assert slave.shard.learn_manifest(replace(told, manifest="")) == MANIFEST
    slave.shard.on_registered(replace(told, manifest=""))


def test_another_incarnation_restarts_the_flow() -> None:
    """A changed incarnation drops all transfers and serves streams of the new one; the same one changes nothing."""
    slave = ShardRig().ready()
    slave.stage(P1, 0.5)
    slave.welcome(Hold())
    assert slave.shard.versions.open_pushes == (P1,)
    slave.welcome(Hold(), sinc=8)
    assert slave.flow.lives == [7, 8]
    assert slave.shard.versions.open_pushes == ()


def test_an_answer_of_an_old_master_is_refused() -> None:
    """Registered of a term below the highest seen changes nothing."""
    slave = ShardRig().ready()
    slave.welcome(Hold(), term=5)
    with pytest.raises(StaleTerm):
        slave.welcome(Hold(), term=4, sinc=9)
    assert (slave.shard.term, slave.shard.sinc) == (5, 7)


@pytest.mark.parametrize(("place", "slaves"), [(0, 0), (3, 3)])
def test_a_slave_has_a_place_among_all(place: int, slaves: int) -> None:
    """By it ranks and slaves take turns; a master that gives none is refused before memory is allocated."""
    slave = ShardRig()
    answer = Registered(1, 7, Hold(), GENESIS, (0, 2), ("", ""), MANIFEST.to_json(), place, slaves)
    with pytest.raises(RemoteProtocolError, match=f"place {place} of {slaves} slaves"):
        slave.shard.on_registered(answer)
