"""The values that pass between a slave's core (core.py) and its shell: what the core is given, and what it wants done.

The daemon's shell (runtime.py) does it with a thread, gRPC and a clock; the simulation's (sim/slave.py) in simulated
time. What must stay true of a shell: work on the shard is done one after another, in the order in which the core asked
for it, and the end of all work, on the shard or beside it, goes back to `SlaveCore.on_done`.
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

Ticket = int  # names an order that came, until it is answered
DiskWork = Callable[[], Answer]  # the part of an order that is done on another thread
Read = Callable[[], None]  # reads the snapshot that is to be loaded

# ---- what the core is given ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlaveIdentity:
    """Who this process is, and where it is reached."""

    run: str
    slave: str
    nonce: str  # of the process
    address: str  # host:port of its control server
    lanes: tuple[str, ...]  # host:port of each data lane
    master: str  # host:port
    key: str = ""  # public, of the data lanes; empty: they are plain
    former_nonce: str = ""  # of the process that held the directory before


@dataclass(frozen=True, slots=True)
class SlaveTiming:
    """Intervals of one slave, in seconds."""

    heartbeat_s: float
    call_s: float = 10.0  # for a Register or a report to be answered
    backoff_s: tuple[float, float] = (0.2, 5.0)  # first and longest pause between two tries to reach the master
    busy_retry_s: float = 0.05  # how soon an order that found the pool full is tried again


@dataclass(frozen=True, slots=True)
class Standing:
    """What a heartbeat says of the shard."""

    sinc: int
    term: int
    memory: VersionId | None
    staged: tuple[PushId, ...]
    pool_used: int
    pool_limit: int


@dataclass(frozen=True, slots=True)
class Meters:
    """What a heartbeat says of the process: bytes since its start, how long its last Apply and Persist took, its
    mirror and its disk.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    persist_s: float = 0.0
    apply_s: float = 0.0
    work_bytes: int = 0  # kernels and disk
    mirror: MirrorReport | None = None  # None: its directory has no mirror
    disk_free: int = 0  # where its snapshots lie
    disk_total: int = 0  # 0: unknown


# ---- work on the shard, and beside it --------------------------------------------------------------------------------


class ShardMethod(StrEnum):
    """The methods of `Shard` (shard.py) that its core asks for, by name."""

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
    ticket: Ticket | None = None  # of the order that it is part of

    @property
    def order(self) -> Order:
        """The order, of work that has a ticket."""
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
    """Read the snapshot that is to be loaded, likewise."""

    order: LoadVersion
    run: Read


@dataclass(frozen=True, slots=True)
class RestoreFromMirror:
    """Bring back what the mirror holds and is newer than `on_disk`, or asked for by the master (`look_for`), beside all
    else; a Restored is its end.
    """

    on_disk: tuple[VersionId, ...]
    look_for: tuple[VersionId, ...] = ()


SlaveWork = ShardWork | WorkOnDisk | ReadSnapshot | RestoreFromMirror

# ---- everything else -------------------------------------------------------------------------------------------------


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
    """Write a line to the log."""

    level: Literal["info", "warning", "error"]
    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndSlave:
    """The master refuses this slave for good, or it cannot serve: the process ends with this error."""

    error: Exception


SlaveAction = SlaveWork | KeepInMirror | CallMaster | AnswerOrder | WriteLog | EndSlave
Actions = list[SlaveAction]
