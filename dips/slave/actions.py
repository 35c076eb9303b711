"""The values exchanged between a slave's core (core.py) and its shell: inputs of the core, and actions that it returns.

The daemon's shell (runtime.py) carries actions out with a thread, gRPC and a clock; the simulation's (sim/slave.py) in
simulated time. What must stay true of a shell: work on the shard is done one piece after another, in the order in which
the core asked for it, and the end of all work, on the shard or beside it, is passed to `SlaveCore.on_done`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any, Literal

from dips.dataclass import dataclass
from dips.ids import PushId, VersionId
from dips.protocol.effects import LoadVersion, Order
from dips.protocol.events import Answer, MirrorReport, PushRefused, PushStaged, SlaveRegistered
from dips.protocol.heartbeats import SlaveHeartbeat

Ticket = int  # identifies a received order until it is answered
DiskWork = Callable[[], Answer]  # the part of an order that runs on another thread
Read = Callable[[], None]  # reads the snapshot that is to be loaded

# ---- inputs of the core ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlaveIdentity:
    """Identity of this process, and its addresses."""

    run: str
    slave: str
    nonce: str  # random, of the process
    address: str  # host:port of its control server
    lanes: tuple[str, ...]  # host:port of each data lane
    master: str  # host:port
    key: str = ""  # public key of the data lanes; empty: they are not encrypted
    former_nonce: str = ""  # nonce of the process that held the directory before


@dataclass(frozen=True, slots=True)
class SlaveTiming:
    """Intervals of one slave, in seconds."""

    heartbeat_s: float
    call_s: float = 10.0  # deadline of a Register or a report
    backoff_s: tuple[float, float] = (0.2, 5.0)  # first and longest pause between two tries to reach the master
    busy_retry_s: float = 0.05  # until an order that found no slot or bank is tried again


@dataclass(frozen=True, slots=True)
class Standing:
    """State of the shard for a heartbeat."""

    sinc: int
    term: int
    memory: VersionId | None
    staged: tuple[PushId, ...]
    pool_used: int
    pool_limit: int


@dataclass(frozen=True, slots=True)
class Meters:
    """State of the process for a heartbeat: bytes since its start, durations of its last Apply and Persist, its mirror
    and its disk.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    persist_s: float = 0.0
    apply_s: float = 0.0
    work_bytes: int = 0  # processed by kernels and disk
    mirror: MirrorReport | None = None  # None: its directory has no mirror
    disk_free: int = 0  # bytes, where its snapshots are
    disk_total: int = 0  # 0: unknown


# ---- work on the shard, and beside it --------------------------------------------------------------------------------


class ShardMethod(StrEnum):
    """Names of the methods of `Shard` (shard.py) that the core asks for."""

    DESCRIBE = "make_registration"
    WELCOME = "on_registered"
    FOLLOW = "follow_order"
    END_LOAD = "end_load"
    DROP_UNLISTED = "drop_unlisted"
    EXECUTE = "execute_order"
    BEGIN_ON_DISK = "begin_disk_order"
    END_ON_DISK = "end_disk_order"


@dataclass(frozen=True, slots=True)
class ShardWork:
    """Call a method of the shard, on the thread that owns it (`Shard.perform_work`)."""

    method: ShardMethod
    arguments: tuple[Any, ...] = ()
    ticket: Ticket | None = None  # of the order that it belongs to

    @property
    def order(self) -> Order:
        """Return the order of work that has a ticket."""
        order = self.arguments[0]
        assert isinstance(order, Order), f"{self.method} is no part of an order"
        return order


@dataclass(frozen=True, slots=True)
class WorkOnDisk:
    """Write or delete snapshots for an order, on any thread, beside the work on the shard."""

    ticket: Ticket
    order: Order
    run: DiskWork


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """Read the snapshot that is to be loaded, on any thread, beside the work on the shard."""

    order: LoadVersion
    run: Read


@dataclass(frozen=True, slots=True)
class RestoreFromMirror:
    """Restore the mirror's versions that are newer than `on_disk` or asked for by the master (`look_for`), beside other
    work; the result is a Restored.
    """

    on_disk: tuple[VersionId, ...]
    look_for: tuple[VersionId, ...] = ()


SlaveWork = ShardWork | WorkOnDisk | ReadSnapshot | RestoreFromMirror

# ---- everything else -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeepInMirror:
    """Pass the mirror, if there is one, the versions to hold; the last of `versions` is copied next."""

    versions: tuple[VersionId, ...]


@dataclass(frozen=True, slots=True)
class CallMaster:
    """Call the master; at most one call of each kind of message is open."""

    message: SlaveRegistered | SlaveHeartbeat | PushStaged | PushRefused
    deadline_s: float


@dataclass(frozen=True, slots=True)
class AnswerOrder:
    """Answer the order with this `ticket`, with an answer or an error."""

    ticket: Ticket
    answer: Answer | Exception


@dataclass(frozen=True, slots=True)
class WriteLog:
    """Write a line to the log."""

    level: Literal["info", "warning", "error"]
    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndSlave:
    """End the process with this error: the master refuses this slave for good, or it cannot serve."""

    error: Exception


SlaveAction = SlaveWork | KeepInMirror | CallMaster | AnswerOrder | WriteLog | EndSlave
Actions = list[SlaveAction]
