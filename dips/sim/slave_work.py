"""The duration of a simulated slave's work; its effect happens at the end."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dips.errors import DipsError
from dips.ids import VersionId
from dips.protocol.effects import Apply, Commit, Fold, KeepSeed, Measure, Persist, Retire
from dips.sim.disk import SimDisk
from dips.slave.actions import ReadSnapshot, ShardMethod, ShardWork, WorkOnDisk

WORK_S: dict[type, float] = {
    Measure: 0.03,
    Fold: 0.03,
    Apply: 0.06,
    Persist: 0.15,
    Commit: 0.02,
    Retire: 0.05,
    KeepSeed: 0.15,
}  # duration of an order, at most double
LOAD_S = 0.3


GROWS = frozenset({Measure, Fold, Apply, Persist})  # orders whose work grows with the model


def order_s(body: type, disk: SimDisk, rng: Random, least_s: float) -> float:
    """Draw the duration of an order of this class; at least `least_s` if its work grows with the model."""
    slowness = disk.slowness if body in (Persist, Retire, KeepSeed) else 1.0
    drawn_s = WORK_S.get(body, 0.0) * slowness * (1.0 + rng.random())
    return max(drawn_s, least_s) if body in GROWS else drawn_s


def shard_work_s(work: ShardWork, disk: SimDisk, rng: Random, least_s: float) -> float:
    """Draw the time for which the shard is busy with `work`; snapshots are written, read and deleted in parallel."""
    return order_s(type(work.order.body), disk, rng, least_s) if work.method is ShardMethod.EXECUTE else 0.0


def disk_work_s(work: WorkOnDisk | ReadSnapshot, disk: SimDisk, rng: Random, least_s: float) -> float:
    """Draw the duration of `work` on the disk, in parallel to the shard's."""
    if isinstance(work, ReadSnapshot):
        return max(LOAD_S, least_s)
    drawn_s = order_s(type(work.order.body), disk, rng, least_s)
    return drawn_s + disk.fsync_s if written_by(work) is not None else drawn_s


def written_by(*works: ShardWork | WorkOnDisk | ReadSnapshot) -> VersionId | None:
    """Return the version whose snapshot is being written, None if none of `works` writes one."""
    for work in works:
        match work:
            case WorkOnDisk() | ShardWork(ShardMethod.BEGIN_ON_DISK):
                if isinstance(work.order.body, Persist):
                    return work.order.body.version
    return None


def attempt_work(work: Callable[..., object], *details: object) -> object:
    """Return the result of work, or the error to be passed to the core."""
    try:
        return work(*details)
    except (DipsError, OSError) as error:
        return error
