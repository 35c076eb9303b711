"""Who a slave is, what its heartbeats say of it, and how patient it is: the values that its core is given."""

from __future__ import annotations

from dips.dataclass import dataclass
from dips.ids import PushId, VersionId
from dips.protocol.events import MirrorReport
from dips.slave.shard import Shard


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

    @staticmethod
    def of_shard(shard: Shard) -> Standing:
        """Take the standing of a shard, on the thread that owns it."""
        versions = shard.versions
        return Standing(
            shard.sinc,
            shard.term,
            versions.served_version,
            shard.staged_pushes,
            versions.used_bytes,
            versions.limit_bytes,
        )


@dataclass(frozen=True, slots=True)
class Meters:
    """What the process knows of itself: bytes since its start, how long its last Apply and Persist took, its mirror."""

    bytes_in: int = 0
    bytes_out: int = 0
    persist_s: float = 0.0
    apply_s: float = 0.0
    work_bytes: int = 0  # kernels and disk
    mirror: MirrorReport | None = None  # None: its directory has no mirror
    disk_free: int = 0  # where its snapshots lie
    disk_total: int = 0  # 0: unknown
