"""What a slave's core wants done: work on the shard, calls to the master, answers to orders. Values, done by a shell.

The daemon (runtime.py) does them with a thread, gRPC and a clock; the simulation (sim/slave.py) in simulated time. What
must stay true of a shell: work on the shard is done one after another, in the order in which the core asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dips.ids import VersionId
from dips.protocol.effects import Order, Registered, SlaveOrder
from dips.protocol.events import Answer, PushRefused, PushStaged, SlaveRegistered
from dips.protocol.heartbeats import SlaveHeartbeat, SlaveHeartbeatAnswer
from dips.slave.shard import Shard
from dips.slave.shard_registration import Followed, Unfollowed
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
    """Do what the answer to a Register orders."""

    order: SlaveOrder

    def run_on(self, shard: Shard) -> Followed | Unfollowed:
        return shard.follow_order(self.order)


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
class BeginPersist:
    """Carry out a Persist, or return what writes the snapshot beside the orders that follow."""

    ticket: Ticket
    order: Order

    def run_on(self, shard: Shard) -> Answer | Callable[[], str]:
        return shard.begin_persist(self.order)


@dataclass(frozen=True, slots=True)
class EndPersist:
    """The writer has ended; `digest` is None if it failed with `error`."""

    ticket: Ticket
    order: Order
    digest: str | None
    error: Exception | None

    def run_on(self, shard: Shard) -> Answer | None:
        return shard.end_persist(self.order, self.digest)


ShardWork = DescribeShard | WelcomeShard | FollowRegistration | HealTransfers | ExecuteOrder | BeginPersist | EndPersist

# ---- everything else -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteSnapshot:
    """Write a snapshot beside the work on the shard, on any thread; its end is reported like that of work."""

    ticket: Ticket
    order: Order
    write: Callable[[], str]  # returns the digest


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


SlaveAction = ShardWork | WriteSnapshot | KeepInMirror | CallMaster | AnswerOrder | WriteLog | EndSlave
Actions = list[SlaveAction]
