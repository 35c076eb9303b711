"""The judge of liveness: beats in, verdicts out (why.md 12, 24, 30). Silence counts only while somebody listens.

It keeps one lease for each life of a cluster and slave, on the master's monotonic clock, and watches whether a
trainer's inner steps move, and how fast its transfers do. The Coordinator never sees a beat, only the verdicts; what
it knows about rounds and versions this file does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.deadlines import Bandwidth
from dips.protocol.events import (
    BandwidthMeasured,
    ClusterSilent,
    TokensReported,
    Event,
    PushStaged,
    SlaveSilent,
    TrainerChanged,
)
from dips.protocol.options import TimingOptions
from dips.protocol.records import LedgerState


@dataclass
class _Cluster:
    inc: int
    heard: float
    stepped: float  # when inner_steps last rose
    signs: tuple[int, str, int] = (0, "", 0)  # inner steps, activity, bytes of its transfer: a change is life
    moving: bool = True
    tokens_consumed: int = 0  # by this life in all
    tokens_lost: int = 0
    bandwidth: Bandwidth = field(default_factory=Bandwidth)


@dataclass
class _Slave:
    sinc: int
    heard: float


class Judge:
    """Leases of all live peers; `now` is the master's monotonic clock, in seconds."""

    def __init__(self, options: TimingOptions) -> None:
        self._options = options
        self._clusters: dict[str, _Cluster] = {}
        self._slaves: dict[str, _Slave] = {}

    @classmethod
    def restored(cls, options: TimingOptions, state: LedgerState, now: float) -> Judge:
        """After a start of the master everybody known gets one full lease before anybody is judged."""
        judge = cls(options)
        for peer in state.clusters:
            if not peer.ended:
                judge.welcome_cluster(peer.name, peer.inc, now)
        return judge

    def welcome_cluster(self, cluster: str, inc: int, now: float) -> None:
        """A life begins; an older one of the same name is forgotten."""
        known = self._clusters.get(cluster)
        if known is None or known.inc < inc:
            self._clusters[cluster] = _Cluster(inc, now, now)

    def welcome_slave(self, slave: str, sinc: int, now: float) -> None:
        known = self._slaves.get(slave)
        if known is None or known.sinc <= sinc:
            self._slaves[slave] = _Slave(sinc, now)

    def report_tokens(self, cluster: str) -> list[Event]:
        """What is known of the tokens of a life that may be about to be fenced by its next one."""
        known = self._clusters.get(cluster)
        return [] if known is None else [TokensReported(cluster, known.inc, known.tokens_consumed, known.tokens_lost)]

    def forget_cluster(self, cluster: str) -> None:
        self._clusters.pop(cluster, None)

    def forget_slave(self, slave: str) -> None:
        self._slaves.pop(slave, None)

    def on_cluster_heartbeat(self, beat: ClusterHeartbeat, now: float) -> list[Event]:
        """Renew the lease; say so if the trainer began or ceased to move, or if its bandwidth is news."""
        known = self._clusters.get(beat.cluster)
        if known is None or known.inc != beat.inc:
            return []
        known.heard, known.tokens_consumed, known.tokens_lost = now, beat.tokens_consumed, beat.tokens_lost
        signs = (beat.inner_steps, beat.activity, beat.bytes_moved)
        if signs != known.signs or _waits_for_others(beat):
            known.signs, known.stepped = signs, now
        found = self._trainer(beat.cluster, known, beat.trainer != "dead", now)
        measured = known.bandwidth.measure(beat.bytes_per_s)
        return found if measured is None else [*found, BandwidthMeasured(beat.cluster, beat.inc, measured)]

    def on_slave_heartbeat(self, beat: SlaveHeartbeat, now: float) -> list[Event]:
        """Renew the lease; repeat what lies staged, so that a lost Staged heals."""
        known = self._slaves.get(beat.slave)
        if known is None or known.sinc != beat.sinc:
            return []
        known.heard = now
        return [PushStaged(beat.slave, beat.sinc, push, 0) for push in beat.staged]

    def verdicts(self, now: float) -> list[Event]:
        """Who has been silent for a lease, in a fixed order; each is said once."""
        lease, found = self._options.lease_s, list[Event]()
        for name, cluster in sorted(self._clusters.items()):
            if now - cluster.heard >= lease:
                silent_s = now - cluster.heard
                found.append(ClusterSilent(name, cluster.inc, silent_s, cluster.tokens_consumed, cluster.tokens_lost))
                del self._clusters[name]
            else:
                found += self._trainer(name, cluster, cluster.moving, now)
        for name, slave in sorted(self._slaves.items()):
            if now - slave.heard >= lease:
                found.append(SlaveSilent(name, slave.sinc, now - slave.heard))
                del self._slaves[name]
        return found

    def shift(self, gap_s: float) -> None:
        """Nobody was listening for `gap_s`: that silence was ours."""
        for cluster in self._clusters.values():
            cluster.heard += gap_s
            cluster.stepped += gap_s
        for slave in self._slaves.values():
            slave.heard += gap_s

    def next_deadline(self) -> float:
        """When the next verdict may be due; inf if nobody is known."""
        lease, hang = self._options.lease_s, self._options.hang_s
        due = [c.heard + lease for c in self._clusters.values()] + [s.heard + lease for s in self._slaves.values()]
        due += [c.stepped + hang for c in self._clusters.values() if c.moving]
        return min(due, default=inf)

    def _trainer(self, name: str, cluster: _Cluster, alive: bool, now: float) -> list[Event]:
        hung = now - cluster.stepped >= self._options.hang_s
        moving = alive and not hung
        if moving == cluster.moving:
            return []
        cluster.moving = moving
        reason = "training" if moving else (self._hung(cluster) if alive else "its trainer died")
        return [TrainerChanged(name, cluster.inc, moving, reason)]

    def _hung(self, cluster: _Cluster) -> str:
        what = "no byte of its transfer" if cluster.signs[1] in _TRANSFERS else "no inner step"
        return f"its trainer hangs: {what} seen for {self._options.hang_s:g} s"


_TRANSFERS = ("push", "pull")


def _waits_for_others(beat: ClusterHeartbeat) -> bool:
    """Has this trainer a reason to stand still? One that moves bytes has none: they must be seen moving."""
    return beat.activity != "inner" and not (beat.activity in _TRANSFERS and 0 < beat.bytes_moved < beat.bytes_total)
