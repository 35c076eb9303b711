"""Interfaces between the parts of a slave: the data flow, the disk, and the actions and reports between them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.errors import StalePush
from dips.ids import PullId, PushId, VersionId
from dips.outer.updates import Update
from dips.protocol.effects import LoadVersion, Order
from dips.protocol.events import Answer, MirrorReport, PushRefused, PushStaged, SlaveRegistered
from dips.protocol.heartbeats import SlaveHeartbeat, Transfer, WorkProgress
from dips.telemetry.refusals import count_refusal
from dips.wire.frame import Kind, StreamName, encode_error

# ---- counters -------------------------------------------------------------------------------------------------------


MOST_CLUSTERS = 1000  # counted by name; later ones are counted together
OTHERS = "others"


class ByCluster:
    """Bytes by cluster since the start of the process; the owner must serialise calls."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def add_bytes(self, cluster: str, nbytes: int) -> None:
        known = cluster in self._bytes or len(self._bytes) < MOST_CLUSTERS
        self._bytes[cluster if known else OTHERS] += nbytes

    def snapshot(self) -> dict[str, int]:
        return dict(self._bytes)


class FrameCounters:
    """Counts of received bytes and refused frames since the start of the process; any thread of the flow may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._received = ByCluster()
        self.bytes_in = 0

    def add_refused(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1
        count_refusal(f"frame_{reason}")

    def add_received(self, cluster: str, nbytes: int) -> None:
        with self._lock:
            self.bytes_in += nbytes
            self._received.add_bytes(cluster, nbytes)

    def refused_by_reason(self) -> Counter[str]:
        with self._lock:
            return self._refused.copy()

    def received_by_cluster(self) -> dict[str, int]:
        with self._lock:
            return self._received.snapshot()


# ---- moves ----------------------------------------------------------------------------------------------------------
# Actions of the data flow, returned by its pure halves (receiver.py, sender.py) and carried out by flow.py.
#
# Messages and wake-ups for the lanes (Say, Wake), refusals to count (FrameRefused) and events for the shard
# (`FlowEvent`), as values, so that both halves can be tested without a socket, and so that nothing is called while a
# lock is held.


@dataclass(frozen=True, slots=True)
class Say:
    """Send one message (not a CHUNK) to one peer of one lane."""

    lane: int
    peer: bytes
    kind: Kind
    stream: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake a lane that can ask for more now."""

    lane: int


@dataclass(frozen=True, slots=True)
class RankMoved:
    """A rank's part of a push: its bytes, and when the first and the last of them came, by the flow's clock."""

    rank: int
    nbytes: int
    first_at: float
    last_at: float


@dataclass(frozen=True, slots=True)
class Staged:
    """All ranges of the push are in its buffers and verified; they are no longer written."""

    push: PushId
    nbytes: int
    ranks: tuple[RankMoved, ...] = field(default=(), compare=False)  # those that brought bytes, for timelines


@dataclass(frozen=True, slots=True)
class PushOver:
    """The push cannot be completed (ranges overlap or leave gaps, it stalled); its buffers are no longer written."""

    push: PushId
    reason: str


Report = Staged | PushOver  # reports for the master


@dataclass(frozen=True, slots=True)
class FrameRefused:
    """Count a frame that was refused although it arrived as it was sent: its push is over, and it is not asked for
    again.
    """

    reason: str  # of REASONS


@dataclass(frozen=True, slots=True)
class Released:
    """The pull's source is no longer read, neither for a rank nor by libzmq. Returned once for each opened pull."""

    pull: PullId
    reason: str


@dataclass(frozen=True, slots=True)
class SourceMoved:
    """The former source of a pull is no longer read after `move_pull`. Not returned after Released."""

    pull: PullId


FlowEvent = Staged | PushOver | Released | SourceMoved  # events for the shard (`ports.Flow`)
Move = Say | Wake | FrameRefused | FlowEvent


def error_message(lane: int, peer: bytes, stream: int, code: str, text: str) -> Say:
    """Return the message that refuses a HELLO."""
    return Say(lane, peer, Kind.ERROR, stream, encode_error(code, text))


class Tombstones:
    """The highest closed (incarnation, seq) of each cluster, which tells a closed transfer from one not open yet."""

    def __init__(self) -> None:
        self._highest: dict[str, tuple[int, int]] = {}

    def close(self, transfer: PushId | PullId) -> None:
        """Close this transfer of its cluster, and all before it."""
        self._highest[transfer.cluster] = max(self._highest_of(transfer.cluster), (transfer.inc, transfer.seq))

    def is_closed(self, transfer: PushId | PullId) -> bool:
        """Whether the transfer is over, even if it was never open here."""
        return (transfer.inc, transfer.seq) <= self._highest_of(transfer.cluster)

    def refuse_closed(self, transfer: PushId | PullId) -> None:
        """Raise StalePush if the transfer is over."""
        if self.is_closed(transfer):
            inc, seq = self._highest_of(transfer.cluster)
            raise StalePush(f"{transfer} is at or below the highest closed one of {transfer.cluster}: {inc}/{seq}")

    def explain_not_open(self, name: StreamName) -> tuple[str, str]:
        """Return (code, message) for the HELLO of a push or pull that is not open."""
        text = f"{name.kind} {name.cluster}/{name.inc} {name.seq} at slave {name.slave}"
        if self.is_closed(PushId(name.cluster, name.inc, name.seq)):
            return "stale_push", f"{text} is over"
        return "unknown", f"{text} is not open yet: try again"

    def _highest_of(self, cluster: str) -> tuple[int, int]:
        return self._highest.get(cluster, (-1, -1))


# ---- actions --------------------------------------------------------------------------------------------------------
# The values exchanged between a slave's core (core.py) and its shell (runtime.py): inputs of the core, and actions that
# it returns.
#
# What must stay true of a shell: work on the shard is done one piece after another, in the order in which the core
# asked for it, and the end of all work, on the shard or beside it, is passed to `SlaveCore.on_done`.


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
    serves: bool = False  # whether pushes or pulls are open here, which a list of live ones may lack


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
    work: WorkProgress | None = None  # what it reads or restores


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


ToMaster = SlaveRegistered | SlaveHeartbeat | PushStaged | PushRefused


@dataclass(frozen=True, slots=True)
class CallMaster:
    """Call the master; at most one call of each kind of message is open."""

    message: ToMaster
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


# ---- ports ----------------------------------------------------------------------------------------------------------
# The two interfaces of a slave's shard: the data flow that moves bytes, and the disk that keeps them.
#
# The shard (shard.py) uses both through these protocols: the daemon implements them with ZeroMQ and files, the
# simulation with a simulated network and simulated disks.


F32 = npt.NDArray[np.float32]
Arrays = Mapping[int, F32]  # layer index in the manifest → the layer's flat parameters


class Flow(Protocol):
    """The data flow of one slave."""

    def start(self, sinc: int, on_event: Callable[[FlowEvent], None]) -> None:
        """Serve streams of incarnation `sinc`; called again after each Register that changed it.

        `on_event` is called from the flow's own threads, and must return at once.
        """

    def open_push(
        self,
        push: PushId,
        places: tuple[int, ...],
        buffers: Arrays,
        deadline_s: float,
        codec: Codec,
        keys: tuple[str, ...] = (),
    ) -> None:
        """Accept HELLOs of the push's len(places) ranks and ask for their chunks, by their places, into `buffers`.

        places      place of each rank in the line of all pushes; the smallest is asked first
        deadline_s  from one rank's HELLO to the next one's
        codec       fp32: chunks are written; a lossy one: they are added to the base in `buffers`
        keys        public key of each rank; not needed for lanes without encryption
        Errors      RemoteProtocolError: the lanes are encrypted, and these are no keys of that many ranks
        """

    def reorder_push(self, push: PushId, places: tuple[int, ...]) -> None:
        """Ask rank i at place `places[i]` of the line of all pushes; present turns go on. Ignored if unknown."""

    def drop_push(self, push: PushId) -> None:
        """Stop receiving a push; its buffers are not written after this returns. Ignored if unknown."""

    def open_pull(
        self,
        pull: PullId,
        version: VersionId,
        source: Arrays,
        chain: tuple[Update, ...] = (),
        keys: tuple[str, ...] = (),
    ) -> None:
        """Serve `source` to the pull's ranks until it is closed, or one of them does not take the chunks it asked for.

        chain  the updates that led to the version, the last one last: for ranks that hold the parent of one of them
        keys, Errors  as for `open_push`
        """

    def move_pull(self, pull: PullId, source: Arrays) -> None:
        """Serve the rest from `source`, the same bytes elsewhere; SourceMoved follows when none of the former is in
        flight.

        Chunks asked for before may still be sent from the former source. Ignored if the pull is closed or unknown.
        """

    def close_pull(self, pull: PullId) -> None:
        """Stop serving a pull; Released follows when no byte of its source is in flight. Ignored if unknown."""

    def admit_probe(self, cluster: str, key: str) -> None:
        """Answer PROBEs of a connection with this key, which measures the path to the lanes, for a while."""

    def list_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers that move now, for heartbeats and status."""


READ_AT_START = 2  # newest snapshots that a slave reads before it registers: the head, and where a rollback returns to


class Disk(Protocol):
    """Snapshots of one slave; every call may raise OSError or CorruptSnapshot."""

    def complete_versions(self, look_for: Collection[VersionId] = ()) -> tuple[VersionId, ...]:
        """Return versions whose snapshot was verified, ascending. The newest few and those of `look_for` are read for
        that, each once; damaged ones are skipped with a log line.
        """

    def unread_versions(self) -> tuple[VersionId, ...]:
        """Return the other versions that are here, ascending: older ones, which nobody has read yet."""

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        """Reserve disk space for a snapshot with `nbytes` of θ and m; raise OSError (ENOSPC) if there is not enough."""

    def release_room(self, version: VersionId) -> None:
        """Release the space reserved for a snapshot that will not be written. Idempotent."""

    def write_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool]) -> str:
        """Make a snapshot durable (written aside, fsynced, renamed, directory fsynced); return its digest.

        A snapshot that this process has already written is not written again. Called on a thread of its own, one at a
        time; raise Stale soon after `is_wanted` becomes False.
        """

    def read_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        """Fill both from the snapshot and verify every digest; v0@r0 comes from the initial model if not on disk."""

    def holds_initial(self) -> bool:
        """Whether v0@r0 can be read, as far as is known without reading it. Does not raise."""

    def keep_initial(self, theta: Arrays) -> None:
        """Make v0@r0 durable, read it back and compare digests; raise CorruptSnapshot if it is another model."""

    def keep_model(self, version: VersionId, theta: Arrays, digests: tuple[str, ...]) -> tuple[str, VersionId | None]:
        """Make a version durable, with m of the newest snapshot of these layers, 0 without one; return the digest of
        its manifest, and that snapshot's version. Raise CorruptSnapshot if θ does not have its digests.
        """

    def map_theta(self, version: VersionId) -> Arrays | None:
        """Map θ of a verified snapshot, readable even after the snapshot is deleted; return None if there is none.

        The bytes are in the page cache, not in the pool. Does not raise: a snapshot that cannot be mapped counts as
        missing.
        """

    def map_momentum(self, version: VersionId) -> tuple[Arrays, tuple[str, ...]] | None:
        """Likewise map m, and return with it the digests of θ and of m of each layer. None for v0@r0, whose m is 0."""

    def delete_snapshots(self, versions: tuple[VersionId, ...]) -> None:
        """Remove snapshots; missing ones are ignored. Maps of them stay readable."""
