"""A version that is loaded here and now: what a slave does with another thread in between."""

from __future__ import annotations

from collections.abc import Callable

from dips.ids import VersionId
from dips.outer.versions import Versions
from dips.protocol.effects import LoadVersion
from dips.slave.ports import Arrays
from dips.slave.shard import Followed, Shard, Unfollowed


def load_version(versions: Versions, version: VersionId, fill: Callable[[Arrays, Arrays], object]) -> None:
    """Serve what `fill` writes; if it raises, what was served is served on."""
    theta, momentum = versions.begin_load(version)
    try:
        fill(theta, momentum)
    except BaseException:
        versions.end_load(False)
        raise
    versions.end_load(True)


def follow_load(shard: Shard, version: VersionId) -> Followed | Unfollowed:
    """Have a shard follow the order to load a version."""
    order = LoadVersion(version)
    read = shard.follow_order(order)
    if not callable(read):
        return read
    try:
        read()
    except Exception as error:  # noqa: BLE001 (the shard says what it means)
        return shard.end_load(order, error)
    return shard.end_load(order, None)
