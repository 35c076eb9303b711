"""Heartbeats, the periodic messages that renew a lease, and their answers.

The answer lists everything that is live for the sender, which drops what is not on the list; this makes up for lost
orders. `as_of` is the number of the last order that the list knows: what a later order opened is kept. A slave names
the list that it has, and only a newer one is sent: with a thousand slaves and clusters the lists would be most of the
master's traffic. The slave compares its list with its state at every heartbeat all the same.
"""

from __future__ import annotations

import math

from dips.dataclass import dataclass
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Progress
from dips.protocol.enums import Activity, ClusterStanding, RemarkSubject, TrainerState
from dips.protocol.events import MirrorReport
from dips.protocol.releases import PROTOCOL, added

LEAST_BYTES_PER_S = 1.0  # slower transfers count as not moving: durations made of such rates leave the finite
REMARK_CHARS = 240  # longest text of a remark, below the 256 characters of any text in a message
MOST_LINES = 8  # of ClusterHeartbeat.lines
MOST_WAITS = 64  # most orders in SlaveHeartbeat.waits; a round's orders and some retirements may wait for one disk
OWN_PACE = -1.0  # ClusterHeartbeatAnswer.push_in_s: the cluster keeps its own pace


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence for an operator about a present problem of a cluster, with its remedy."""

    subject: RemarkSubject
    text: str


@dataclass(frozen=True, slots=True)
class ClusterHeartbeat:
    cluster: str
    inc: int
    trainer: TrainerState
    activity: Activity
    attempt: int  # starts of the trainer under this agent
    inner_steps: int  # taken by this agent's trainer since the agent's start
    tokens_carried: int  # consumed, not yet settled by an Outcome
    tokens_lost: int  # consumed and lost with dead trainers, in this incarnation
    loss: float
    base: VersionId | None
    bytes_moved: int  # in the present transfer
    bytes_total: int
    bytes_per_s: float  # of the present or last push; of pulls, while there was none
    aligned_steps: int = 0  # H at its own pace, if it pushes together with others; 0: it keeps its own pace
    step_s: float = 0.0  # time of an inner step; 0 while unknown
    since_push: int = 0  # inner steps since its last push
    tokens_consumed: int = 0  # of this incarnation in all: carried, lost, or settled by an Outcome
    transfer_seq: int = 0  # seq of the push or pull that its ranks prepare or move; 0: none
    remarks: tuple[Remark, ...] = ()  # one for each subject, of `script` two: INSIDE is told as it
    lines: tuple[str, ...] = ()  # last lines of the trainer's standard error, while they may explain a failure
    idle_s: float = 0.0  # expected idle time of a push: see PushRequested
    newest_protocol: int = added(2, 0, PROTOCOL)  # as in ClusterJoined


@dataclass(frozen=True, slots=True)
class ClusterHeartbeatAnswer:
    term: int
    lease_s: float
    standing: ClusterStanding
    push: PushId | None
    pull: PullId | None
    progress: Progress
    push_in_s: float = OWN_PACE  # aligned pace: seconds until its push should begin
    head: VersionId | None = None  # for one that only pulls; None: others learn it from their rounds


def remaining_s(nbytes: int, total: int, bytes_per_s: float) -> float:
    """Return the seconds until `total` bytes are moved at this rate; infinite while nothing moves."""
    if nbytes >= total:
        return 0.0
    return (total - nbytes) / bytes_per_s if bytes_per_s >= LEAST_BYTES_PER_S else math.inf


@dataclass(frozen=True, slots=True)
class Transfer:
    """One push or pull that moves through a slave."""

    cluster: str
    inc: int
    seq: int
    push: bool
    nbytes: int
    total: int
    bytes_per_s: float = 0.0  # over the last seconds

    @property
    def remaining_s(self) -> float:
        return remaining_s(self.nbytes, self.total, self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class WorkProgress:
    """How far a slave is that reads a snapshot, or restores one from its mirror, before it serves."""

    doing: str  # for people: `reads v3@r5`
    nbytes: int
    total: int
    bytes_per_s: float  # since it began

    def describe_progress(self) -> str:
        """Say how much is done, how fast, and how long the rest will take at that rate."""
        rest_s = remaining_s(self.nbytes, self.total, self.bytes_per_s)
        rest = f"{rest_s:,.0f} s left" if math.isfinite(rest_s) else "nothing moves"
        done = f"{self.nbytes / 1e9:,.2f} of {self.total / 1e9:,.2f} GB"
        return f"{self.doing}: {done} at {self.bytes_per_s / 1e6:,.0f} MB/s, {rest}"


@dataclass(frozen=True, slots=True)
class OrderWait:
    """An unanswered order that waits for a slave's disk."""

    number: int
    kind: str
    for_s: float  # since it came


@dataclass(frozen=True, slots=True)
class SlaveHeartbeat:
    slave: str
    sinc: int
    term: int
    memory: VersionId | None
    staged: tuple[PushId, ...]  # full and not yet measured
    transfers: tuple[Transfer, ...]
    pool_used: int  # bytes
    pool_limit: int  # bytes
    bytes_in: int  # since the start of the process
    bytes_out: int
    persist_s: float  # of the last snapshot
    apply_s: float  # of the last Apply
    work_bytes: int = 0  # processed by kernels and disk, so that a long order is told from one that hangs
    mirror: MirrorReport | None = None  # None: its directory has no mirror
    live: int = 0  # number of the last list of live transfers that it got in this term; 0: none
    disk_free: int = 0  # free bytes where its snapshots are, for display only
    disk_total: int = 0  # 0: unknown
    waits: tuple[OrderWait, ...] = ()  # the oldest MOST_WAITS
    work: WorkProgress | None = None  # what it reads or restores before it serves, for display only


@dataclass(frozen=True, slots=True)
class LiveTransfers:
    """All pushes that hold a slot and all pulls that pin a version, the same for all slaves."""

    number: int  # number of this list in its term; rises with every change
    pushes: tuple[PushId, ...]
    pulls: tuple[PullId, ...]


@dataclass(frozen=True, slots=True)
class SlaveHeartbeatAnswer:
    term: int
    lease_s: float
    register: bool  # the slave is not READY at this master and must register
    as_of: int
    live: LiveTransfers | None = None  # None: as in the list whose number the heartbeat named
    mirror: tuple[VersionId, ...] = ()  # its mirror should hold: the last is copied next, unnamed ones may go
