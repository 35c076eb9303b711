"""Heartbeats: the periodic messages that renew a lease, and their answers.

The answer lists everything that is live for the asker; what is not on it is dropped there, which makes up for lost
orders. `as_of` is the number of the last order that the list knows: what was opened by a later one stays. A slave says
which list it has, and only another one is sent: with a thousand slaves and clusters the lists would be most of what a
master says. The list that it has is held against what it holds at every heartbeat all the same.
"""

from __future__ import annotations

import math

from dips.dataclass import dataclass
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Progress
from dips.protocol.enums import Activity, ClusterStanding, RemarkSubject, TrainerState
from dips.protocol.events import MirrorReport

LEAST_BYTES_PER_S = 1.0  # a slower transfer counts as not moving: times made from such rates leave the finite
REMARK_CHARS = 240  # so that it arrives: any text has at most 256
MOST_LINES = 8  # of ClusterHeartbeat.lines
MOST_WAITS = 64  # orders in SlaveHeartbeat.waits: what waits for one disk is a round's and some retirements
OWN_PACE = -1.0  # ClusterHeartbeatAnswer.push_in_s: the cluster keeps its own pace


@dataclass(frozen=True, slots=True)
class Remark:
    """What a person should know of a cluster now, and its remedy."""

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
    bytes_moved: int  # of the present transfer
    bytes_total: int
    bytes_per_s: float  # of the present or last transfer
    aligned_steps: int = 0  # H that it would take by itself, if it pushes together with others; 0: its own pace
    step_s: float = 0.0  # time of an inner step; 0 while unknown
    since_push: int = 0  # inner steps since its last push
    tokens_consumed: int = 0  # by this incarnation in all: carried, lost, or settled by an Outcome
    transfer_seq: int = 0  # of the push or pull that its ranks come to, or move; 0: none
    remarks: tuple[Remark, ...] = ()  # one for each subject
    lines: tuple[str, ...] = ()  # the last of its trainer's standard error, while that may explain something
    idle_s: float = 0.0  # of a push: see PushRequested


@dataclass(frozen=True, slots=True)
class ClusterHeartbeatAnswer:
    term: int
    lease_s: float
    standing: ClusterStanding
    push: PushId | None
    pull: PullId | None
    progress: Progress
    push_in_s: float = OWN_PACE  # aligned pace: until its push should begin


def remaining_s(nbytes: int, total: int, bytes_per_s: float) -> float:
    """Seconds until `total` bytes are moved at this rate; infinite while nothing moves."""
    if nbytes >= total:
        return 0.0
    return (total - nbytes) / bytes_per_s if bytes_per_s >= LEAST_BYTES_PER_S else math.inf


@dataclass(frozen=True, slots=True)
class Transfer:
    """One push or pull moving through a slave."""

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
class OrderWait:
    """An order that came to a slave, is not answered, and waits for its disk."""

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
    work_bytes: int = 0  # that kernels and disk have worked through: what lasts is told from what hangs
    mirror: MirrorReport | None = None  # None: its directory has no mirror
    live: int = 0  # number of the last list of what is live that it got in this term; 0: none
    disk_free: int = 0  # bytes where its snapshots lie, for showing only
    disk_total: int = 0  # 0: unknown
    waits: tuple[OrderWait, ...] = ()  # the oldest MOST_WAITS


@dataclass(frozen=True, slots=True)
class LiveTransfers:
    """Every push that holds a slot and every pull that pins a version, for all slaves."""

    number: int  # of this list in its term: rises with every change
    pushes: tuple[PushId, ...]
    pulls: tuple[PullId, ...]


@dataclass(frozen=True, slots=True)
class SlaveHeartbeatAnswer:
    term: int
    lease_s: float
    register: bool  # this master does not know you as READY: register
    as_of: int
    live: LiveTransfers | None = None  # None: the list whose number the heartbeat named
    mirror: tuple[VersionId, ...] = ()  # what its mirror is to hold: the last is copied next, what is not named may go
