"""A shard that holds no version takes the first one as a push, and has it on its disk before it says so."""

from __future__ import annotations

import numpy as np
import pytest

from dips.errors import CorruptSnapshot, FailedDisk, LocalProtocolError, StalePush, StaleVersion
from dips.ids import PushId, VersionId
from dips.protocol.effects import DropPush, KeepSeed, OpenPush, RegisterLater
from dips.protocol.events import Done, ModelKept
from dips.slave.ports import Staged
from dips.store.version import digest_of
from tests.unit.slave.shard_rig import WHO, MemoryDisk, ShardRig

FIRST, SECOND = PushId("dips.seed", 1, 1), PushId("dips.seed", 2, 1)
SEED = OpenPush(FIRST, 1, 10.0, seed=True)


def waiting() -> ShardRig:
    rig = ShardRig(disk=MemoryDisk(initial=None))
    rig.welcome(RegisterLater(1.0, "waits"))
    return rig


def is_unseeded(rig: ShardRig) -> bool:
    return rig.shard.make_registration(WHO).unseeded


def fill(rig: ShardRig, push: PushId, value: float) -> None:
    for array in rig.flow.pushes[push].values():
        array.fill(value)
    rig.shard.transfers.on_flow_event(Staged(push, 28))


def test_the_first_model_is_kept() -> None:
    """Opened without a version, staged, written down, and then the slave says that it has it."""
    rig = waiting()
    assert is_unseeded(rig)
    with pytest.raises(StaleVersion, match="holds no version yet"):
        rig.order(OpenPush(PushId("x", 1, 1), 1, 10.0))
    assert rig.order(SEED) == Done()
    with pytest.raises(LocalProtocolError, match="still moving"):
        rig.order(KeepSeed(FIRST))
    fill(rig, FIRST, 2.5)
    assert rig.shard.take_reports() == [Staged(FIRST, 28)]
    assert rig.order(KeepSeed(FIRST)) == Done()
    assert rig.disk.initial == {i: np.full(n, 2.5, np.float32).tobytes() for i, n in ((0, 6), (2, 1))}
    assert not is_unseeded(rig)
    rig.order(DropPush(FIRST, "it is on the disk"))
    assert rig.shard.versions.open_pushes == ()


def test_a_full_disk_keeps_nothing() -> None:
    """The order fails with the reason, and may be tried again."""
    rig = waiting()
    rig.order(SEED)
    fill(rig, FIRST, 1.0)
    rig.disk.error = OSError(28, "no space left")
    with pytest.raises(FailedDisk, match="cannot write the first model"):
        rig.order(KeepSeed(FIRST))
    assert is_unseeded(rig)
    assert rig.order(KeepSeed(FIRST)) == Done()


def test_a_recovered_version_is_kept_beside_what_is_served() -> None:
    """θ of the push under the version's name, with m of the newest snapshot; without one m is 0."""
    version, layers = VersionId(3, 7), {0: 6, 2: 1}
    digests = tuple(digest_of(np.full(n, 2.5, np.float32)) for n in layers.values())
    for held in (VersionId(2, 5), None):
        rig = waiting()
        if held is not None:
            flat = [{i: np.full(n, value, np.float32) for i, n in layers.items()} for value in (1.0, 4.0)]
            rig.disk.write_snapshot(held, *flat, lambda: True)
        rig.order(SEED)
        fill(rig, FIRST, 2.5)
        with pytest.raises(CorruptSnapshot):
            rig.order(KeepSeed(FIRST, version, ("0" * 32,) * 2))
        assert rig.order(KeepSeed(FIRST, version, digests)) == ModelKept(f"digest of {version}", held)
        theta, momentum = rig.disk.kept[version]
        assert theta == {i: np.full(n, 2.5, np.float32).tobytes() for i, n in layers.items()}
        assert momentum == {i: np.full(n, 4.0 if held else 0.0, np.float32).tobytes() for i, n in layers.items()}
        assert is_unseeded(rig), "it is not the first model"


def test_what_a_dead_master_opened_gives_way() -> None:
    """Its successor opens another: no slot leaks, however often masters die."""
    rig = waiting()
    for term in range(1, 6):
        rig.term, push = term, PushId("dips.seed", term, 1)
        rig.welcome(RegisterLater(1.0, "waits"))  # a slave follows a term when it has registered there
        assert rig.order(OpenPush(push, 1, 10.0, seed=True)) == Done()
        assert rig.shard.versions.open_pushes == (push,)
    with pytest.raises(StalePush):
        rig.order(SEED)
    with pytest.raises(StalePush):
        rig.order(KeepSeed(SECOND))


def test_a_seed_takes_no_slot_of_a_cluster() -> None:
    """A saved model is brought while a push is still open here: only the same sender's former transfer gives way."""
    rig = ShardRig().ready()
    push = PushId("x", 1, 1)
    for body in (OpenPush(push, 1, 10.0), SEED):
        assert rig.order(body) == Done()
    assert rig.shard.versions.open_pushes == (push, FIRST)
