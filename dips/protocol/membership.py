"""The failure detector: turns heartbeats, and their absence, into events (docs/rationale.md#12, #24, #30). Silence
counts only while the master runs.

It keeps one lease for each incarnation of a cluster or slave, on the master's monotonic clock, and watches the inner
steps of trainers and the speed of transfers. The Coordinator never sees a heartbeat, only the events; this module knows
no rounds and no versions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from dips.protocol import events
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.options import TimingOptions
from dips.protocol.records import LedgerState
from dips.protocol.transfer_book import Bandwidth

HANG_STEPS = 5  # a trainer without a new inner step for this multiple of their duration may hang
REPORTS = 4  # how often an awaited transfer is reported within `least_transfer_s`


@dataclass
class _Cluster:
    inc: int
    heard_at: float
    progressed_at: float  # when inner_steps last rose
    signs: tuple[int, Activity, int] = (
        0,
        Activity.IDLE,
        0,
    )  # inner steps, activity, bytes moved: a change is progress
    moving: bool = True
    tokens_consumed: int = 0  # of this incarnation in all
    tokens_lost: int = 0
    reported: events.TokensReported | None = None
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    step_s: float = 0.0  # duration of an inner step, as reported; 0 while unknown
    awaited: tuple[int, float] = (0, 0.0)  # seq of the push or pull last reported as awaited, and when
    newest_protocol: int = 0  # as last reported


@dataclass
class _Slave:
    sinc: int
    heard_at: float
    mirror: events.MirrorReport | None = None  # as last reported


class Judge:
    """The leases of all live peers; `now` is the master's monotonic clock, in seconds."""

    def __init__(self, options: TimingOptions) -> None:
        self._options = options
        self._clusters: dict[str, _Cluster] = {}
        self._slaves: dict[str, _Slave] = {}
        # No event is due before this time; None: unknown. A heartbeat moves its own deadlines back, so the earliest
        # deadline stays a lower bound: all peers are checked once in a lease, not at every heartbeat.
        self._due: float | None = None

    @classmethod
    def from_state(cls, options: TimingOptions, state: LedgerState, now: float) -> Judge:
        """Return a Judge that gives every peer of the ledger one full lease after a start of the master."""
        judge = cls(options)
        for peer in state.clusters:
            if not peer.ended:
                judge.welcome_cluster(peer.name, peer.inc, now)
        return judge

    def welcome_cluster(self, cluster: str, inc: int, now: float) -> None:
        """Start the lease of an incarnation; an older one of the same name is forgotten."""
        known = self._clusters.get(cluster)
        if known is None or known.inc < inc:
            self._clusters[cluster] = _Cluster(inc, now, now)
            self._look_at(min(now + self._options.lease_s, now + self._options.hang_s))

    def welcome_slave(self, slave: str, sinc: int, now: float) -> None:
        known = self._slaves.get(slave)
        if known is None or known.sinc <= sinc:
            self._slaves[slave] = _Slave(sinc, now)
            self._look_at(now + self._options.lease_s)

    def heard_s(self, cluster: str, now: float) -> float:
        """Return the seconds since the cluster's live incarnation was heard, at most a lease."""
        known = self._clusters.get(cluster)
        return self._options.lease_s if known is None else min(now - known.heard_at, self._options.lease_s)

    def slave_heard_s(self, slave: str, now: float) -> float:
        """Return the seconds since the slave's live incarnation was heard, at most a lease."""
        known = self._slaves.get(slave)
        return self._options.lease_s if known is None else min(now - known.heard_at, self._options.lease_s)

    def report_tokens(self, cluster: str) -> list[events.Event]:
        """Return an event with the progress of the cluster's incarnation, if it has changed since the last one."""
        known = self._clusters.get(cluster)
        if known is None:
            return []
        report = events.TokensReported(cluster, known.inc, known.tokens_consumed, known.tokens_lost, known.signs[0])
        news = report != known.reported
        known.reported = report
        return [report] if news else []

    def forget_cluster(self, cluster: str) -> None:
        self._clusters.pop(cluster, None)

    def on_cluster_heartbeat(self, heartbeat: ClusterHeartbeat, now: float) -> list[events.Event]:
        """Renew the lease; return events for a trainer that began or ceased to move and for a bandwidth that has
        changed.
        """
        known = self._clusters.get(heartbeat.cluster)
        if known is None or known.inc != heartbeat.inc:
            return []
        known.heard_at, known.tokens_consumed, known.tokens_lost = now, heartbeat.tokens_consumed, heartbeat.tokens_lost
        known.step_s = heartbeat.step_s
        signs = (heartbeat.inner_steps, heartbeat.activity, heartbeat.bytes_moved)
        if signs != known.signs or _waits_for_others(heartbeat):
            known.signs, known.progressed_at = signs, now
        found = self._judge_trainer(heartbeat.cluster, known, heartbeat.trainer is not TrainerState.DEAD, now)
        if known.moving:
            self._look_at(known.progressed_at + self._hang_s(known))
        measured = known.bandwidth.measure_rate(heartbeat.bytes_per_s)
        found += [] if measured is None else [events.BandwidthMeasured(heartbeat.cluster, heartbeat.inc, measured)]
        if heartbeat.newest_protocol != known.newest_protocol:
            known.newest_protocol = heartbeat.newest_protocol
            found.append(events.ProtocolTold(heartbeat.cluster, heartbeat.inc, heartbeat.newest_protocol))
        return found + self._find_awaited(known, heartbeat, now)

    def _find_awaited(self, known: _Cluster, heartbeat: ClusterHeartbeat, now: float) -> list[events.Event]:
        """Return an event for the push or pull that a cluster in the middle of a step awaits, at most a few times per
        deadline.
        """
        seq, (told, at) = heartbeat.transfer_seq, known.awaited
        if not seq or not known.moving or (told == seq and now - at < self._options.least_transfer_s / REPORTS):
            return []
        known.awaited = (seq, now)
        return [events.TransferAwaited(heartbeat.cluster, heartbeat.inc, seq)]

    def on_slave_heartbeat(self, heartbeat: SlaveHeartbeat, now: float) -> list[events.Event]:
        """Renew the lease; return events for staged pushes, which makes up for a lost PushStaged, and for a changed
        mirror.
        """
        known = self._slaves.get(heartbeat.slave)
        if known is None or known.sinc != heartbeat.sinc:
            return []
        known.heard_at = now
        found: list[events.Event] = [
            events.PushStaged(heartbeat.slave, heartbeat.sinc, push, 0) for push in heartbeat.staged
        ]
        if heartbeat.mirror is not None and heartbeat.mirror != known.mirror:
            known.mirror = heartbeat.mirror
            found.append(events.MirrorReported(heartbeat.slave, heartbeat.sinc, heartbeat.mirror))
        return found

    def judge_silence(self, now: float) -> list[events.Event]:
        """Return an event for each peer that has been silent for a lease, in a fixed order; each is reported once."""
        self._due = None
        lease, found = self._options.lease_s, list[events.Event]()
        for name, cluster in sorted(self._clusters.items()):
            if now - cluster.heard_at >= lease:
                silent_s = now - cluster.heard_at
                found.append(
                    events.ClusterSilent(name, cluster.inc, silent_s, cluster.tokens_consumed, cluster.tokens_lost)
                )
                del self._clusters[name]
            else:
                found += self._judge_trainer(name, cluster, cluster.moving, now)
        for name, slave in sorted(self._slaves.items()):
            if now - slave.heard_at >= lease:
                found.append(events.SlaveSilent(name, slave.sinc, now - slave.heard_at))
                del self._slaves[name]
        return found

    def skip_gap(self, gap_s: float) -> None:
        """Shift all leases by `gap_s`, in which the master did not run and heard no peer."""
        self._due = None
        for cluster in self._clusters.values():
            cluster.heard_at += gap_s
            cluster.progressed_at += gap_s
        for slave in self._slaves.values():
            slave.heard_at += gap_s

    def next_deadline(self) -> float:
        """Return when the next event may be due, or an earlier time; inf if there are no peers."""
        if self._due is None:
            lease = self._options.lease_s
            due = [c.heard_at + lease for c in self._clusters.values()]
            due += [s.heard_at + lease for s in self._slaves.values()]
            due += [c.progressed_at + self._hang_s(c) for c in self._clusters.values() if c.moving]
            self._due = min(due, default=inf)
        return self._due

    def _look_at(self, when: float) -> None:
        """Record that an event may be due at this time."""
        if self._due is not None and when < self._due:
            self._due = when

    def _judge_trainer(self, name: str, cluster: _Cluster, alive: bool, now: float) -> list[events.Event]:
        hung = now - cluster.progressed_at >= self._hang_s(cluster)
        moving = alive and not hung
        if moving == cluster.moving:
            return []
        cluster.moving = moving
        reason = "training" if moving else (self._hang_reason(cluster) if alive else "its trainer died")
        return [events.TrainerChanged(name, cluster.inc, moving, reason)]

    def _hang_s(self, cluster: _Cluster) -> float:
        """Return after how many seconds without progress a trainer hangs: by its own steps, at least `hang_s`."""
        return max(self._options.hang_s, HANG_STEPS * cluster.step_s)

    def _hang_reason(self, cluster: _Cluster) -> str:
        what = "no byte of its transfer" if cluster.signs[1] in _TRANSFERS else "no inner step"
        return f"its trainer hangs: {what} seen for {self._hang_s(cluster):.4g} s"


_TRANSFERS = (Activity.PUSH, Activity.PULL)


def _waits_for_others(heartbeat: ClusterHeartbeat) -> bool:
    """Whether the trainer stands still for a good reason. While it moves bytes it has none: they must be seen moving.

    Nor has it one while its transfer is open and not begun: its ranks come to it within an inner step, and a trainer
    that hangs before its first byte must not hold its slot for ever.
    """
    transfers, moved, total = heartbeat.activity in _TRANSFERS, heartbeat.bytes_moved, heartbeat.bytes_total
    comes_to_it = transfers and bool(heartbeat.transfer_seq) and not total
    moves_bytes = transfers and 0 < moved < total
    return heartbeat.activity is not Activity.INNER and not moves_bytes and not comes_to_it
