"""How long a simulated slave takes for what its core wants done; the effect stands at the end of that time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dips.errors import DipsError
from dips.ids import VersionId
from dips.protocol.effects import Apply, Commit, Fold, LoadVersion, Measure, Order, Persist
from dips.sim.disk import SimDisk
from dips.slave.actions import BeginPersist, ExecuteOrder, FollowRegistration, ShardWork, WriteSnapshot

WORK_S: dict[type, float] = {
    Measure: 0.03,
    Fold: 0.03,
    Apply: 0.06,
    Persist: 0.15,
    Commit: 0.02,
}  # of an order, at most double
LOAD_S = 0.3


def order_s(body: type, disk: SimDisk, rng: Random) -> float:
    """Draw how long an order of this class takes."""
    slowness = disk.slowness if body is Persist else 1.0
    return WORK_S.get(body, 0.0) * slowness * (1.0 + rng.random())


def shard_work_s(work: ShardWork, memory: VersionId | None, disk: SimDisk, rng: Random) -> float:
    """Draw how long the shard is busy with `work` while it serves `memory`, whose snapshot is written beside it."""
    match work:
        case FollowRegistration():
            return LOAD_S if isinstance(work.order, LoadVersion) else 0.0
        case ExecuteOrder():
            return order_s(type(work.order.body), disk, rng)
        case BeginPersist() if persisted_version(work.order) != memory:
            return order_s(Persist, disk, rng)
        case _:
            return 0.0


def written_by(work: ShardWork | WriteSnapshot | None) -> VersionId | None:
    """The version whose snapshot is being written, None if `work` writes none."""
    return persisted_version(work.order) if isinstance(work, WriteSnapshot | BeginPersist) else None


def persisted_version(order: Order) -> VersionId:
    """The version that a Persist is about."""
    assert isinstance(order.body, Persist), order
    return order.body.version


def attempt_work(work: Callable[[], object]) -> object:
    """What work on the shard returns, or the error that its core is to hear of."""
    try:
        return work()
    except (DipsError, OSError) as error:
        return error
