"""What a shard does with the order that it gets when it registers: Hold, Load, Commit, Abort.

Functions, called on the thread that owns the shard. What cannot be done is the reason of the next Register; what was
held is held on. A load takes as long as its disk does, so it is only begun here: another thread reads the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from dips.dataclass import dataclass
from dips.errors import Busy, Corrupt, Stale, StaleVersion
from dips.protocol.effects import AbortVersion, CommitVersion, Hold, LoadVersion, RegisterLater, SlaveOrder
from dips.slave.shard_round import ShardRound


class Followed(Enum):
    """What an order that was followed leads to."""

    SERVES = "it was told Hold"
    WAITS = "there was nothing to do: register again later"
    DONE = "it holds something else now: register again at once"


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """The order could not be followed."""

    reason: str


Read = Callable[[], None]  # reads the snapshot that is to be loaded; `end_load` follows


def follow_order(rounds: ShardRound, order: SlaveOrder) -> Followed | Unfollowed | Read:
    """Do what the master said to a Register, or begin the load that it orders."""
    if isinstance(order, Hold):
        return Followed.SERVES
    if isinstance(order, RegisterLater):
        return Followed.WAITS
    try:
        return _carry_out(rounds, order) or Followed.DONE
    except (Busy, Corrupt, Stale, OSError) as error:
        return _unfollowed(order, error)


def end_load(rounds: ShardRound, order: LoadVersion, error: Exception | None) -> Followed | Unfollowed:
    """The snapshot was read, or could not be."""
    rounds.versions.end_load(error is None)
    if error is None:
        return Followed.DONE
    if not isinstance(error, Corrupt | OSError):
        raise error
    return _unfollowed(order, error)


def _unfollowed(order: LoadVersion | CommitVersion | AbortVersion, error: Exception) -> Unfollowed:
    return Unfollowed(f"{type(order).__name__} {order.version}: {error}")


def _carry_out(rounds: ShardRound, order: LoadVersion | CommitVersion | AbortVersion) -> Read | None:
    prepared, memory = rounds.versions.prepared, rounds.versions.served_version
    if isinstance(order, AbortVersion):
        if memory == order.version:
            # The Commit was under way when this slave registered, and the master has rolled the version back since: it
            # must learn what is served here now, and will order a load (seed 64).
            raise StaleVersion(f"{order.version} is committed and served here, and was to be aborted")
        if prepared == order.version:
            rounds.end_round()
    elif prepared == order.version:
        rounds.flip_version(order.version)
    elif memory == order.version:
        rounds.end_round()
    else:
        return rounds.begin_load(order.version)
    return None
