"""What a slave's core wants done: work on the shard, calls to the master, answers to orders. Values, done by a shell.

The daemon (runtime.py) does them with a thread, gRPC and a clock; the simulation (sim/slave.py) in simulated time. What
must stay true of a shell: work on the shard is done one after another, in the order in which the core asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Literal

from dips.dataclass import dataclass
from dips.ids import VersionId
from dips.protocol.effects import LoadVersion, Order, Registered, SlaveOrder
from dips.protocol.events import Answer, PushRefused, PushStaged, SlaveRegistered
from dips.protocol.heartbeats import SlaveHeartbeat, SlaveHeartbeatAnswer
from dips.slave.shard import Shard
from dips.slave.shard_registration import Followed, Read, Unfollowed
from dips.slave.shard_snapshots import DiskWork
from dips.slave.standing import SlaveIdentity

Ticket = int  # names an order that came, until it is answered

# ---- work on the shard; `run_on` is called on the thread that owns it, and may raise ---------------------------------


@dataclass(frozen=True, slots=True)
class DescribeShard:
    """Say what is held, for a Register."""

    identity: SlaveIdentity

    def run_on(self, shard: Shard) -> SlaveRegistered:
        who = self.identity
        return shard.make_registration(0, who.nonce, who.run, who.address, who.lanes, who.key)


@dataclass(frozen=True, slots=True)
class WelcomeShard:
    """Take the term, the incarnation and the layers; `prepare` may refuse them before memory is allocated."""

    registered: Registered
    prepare: Callable[[Registered], None]

    def run_on(self, shard: Shard) -> None:
        self.prepare(self.registered)
        shard.on_registered(self.registered)


@dataclass(frozen=True, slots=True)
class FollowRegistration:
    """Do what the answer to a Register orders, or return what reads the snapshot that is to be loaded."""

    order: SlaveOrder

    def run_on(self, shard: Shard) -> Followed | Unfollowed | Read:
        return shard.follow_order(self.order)


@dataclass(frozen=True, slots=True)
class EndLoad:
    """A snapshot was read, or could not be."""

    order: LoadVersion
    error: Exception | None

    def run_on(self, shard: Shard) -> Followed | Unfollowed:
        return shard.end_load(self.order, self.error)


@dataclass(frozen=True, slots=True)
class HealTransfers:
    """Drop what the master does not list as live."""

    answer: SlaveHeartbeatAnswer

    def run_on(self, shard: Shard) -> list[str]:
        return shard.drop_unlisted(self.answer)


@dataclass(frozen=True, slots=True)
class ExecuteOrder:
    """Carry out an order."""

    ticket: Ticket
    order: Order

    def run_on(self, shard: Shard) -> Answer:
        return shard.execute_order(self.order)


@dataclass(frozen=True, slots=True)
class BeginDiskOrder:
    """Begin a Persist or a Retire: return what is done on the disk beside the orders that follow."""

    ticket: Ticket
    order: Order

    def run_on(self, shard: Shard) -> Answer | DiskWork:
        return shard.begin_disk_order(self.order)


@dataclass(frozen=True, slots=True)
class EndDiskOrder:
    """That has ended, with an answer or an error."""

    ticket: Ticket
    order: Order
    result: Answer | Exception

    def run_on(self, shard: Shard) -> None:
        shard.end_disk_order(self.order, None if isinstance(self.result, Exception) else self.result)


ShardWork = (
    DescribeShard
    | WelcomeShard
    | FollowRegistration
    | EndLoad
    | HealTransfers
    | ExecuteOrder
    | BeginDiskOrder
    | EndDiskOrder
)

# ---- everything else -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkOnDisk:
    """Write or delete snapshots beside the work on the shard, on any thread; its end is reported like that of work."""

    ticket: Ticket
    order: Order
    run: DiskWork


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """Read the snapshot that is to be loaded, likewise."""

    order: LoadVersion
    run: Read


@dataclass(frozen=True, slots=True)
class RestoreFromMirror:
    """Bring back what the mirror holds and is newer than `on_disk`, or asked for by the master (`look_for`), beside all
    else; a Restored is its end."""

    on_disk: tuple[VersionId, ...]
    look_for: tuple[VersionId, ...] = ()


WorkBeside = WorkOnDisk | ReadSnapshot | RestoreFromMirror


@dataclass(frozen=True, slots=True)
class KeepInMirror:
    """Tell the mirror, if there is one, what it is to hold: the last of `versions` next."""

    versions: tuple[VersionId, ...]


@dataclass(frozen=True, slots=True)
class CallMaster:
    """Ask the master; of each kind of message at most one is under way."""

    message: SlaveRegistered | SlaveHeartbeat | PushStaged | PushRefused
    deadline_s: float


@dataclass(frozen=True, slots=True)
class AnswerOrder:
    """Answer the order that came under `ticket`, by an answer or by an error."""

    ticket: Ticket
    answer: Answer | Exception


@dataclass(frozen=True, slots=True)
class WriteLog:
    """Tell a person."""

    level: Literal["info", "warning", "error"]
    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndSlave:
    """The master refuses this slave for good, or it cannot serve: the process ends with this error."""

    error: Exception


SlaveAction = ShardWork | WorkBeside | KeepInMirror | CallMaster | AnswerOrder | WriteLog | EndSlave
Actions = list[SlaveAction]
