"""What must always be true of waiting: everything ends, and nobody is given up too early (invariant 12)."""

from __future__ import annotations

import re
from statistics import median

from dips.protocol.effects import Outcome
from dips.protocol.events import ClusterSilent, Event, SlaveSilent
from dips.protocol.records import (
    ClusterReadmitted,
    LedgerState,
    PenaltyRow,
    Record,
    RolledBack,
    RoundEnded,
    RunExtended,
    RunFinished,
    VersionCommitted,
)
from dips.sim.agent import SimAgent, SimCluster
from dips.sim.slave import SlaveProcess
from dips.sim.work import Frozen
from dips.sim.world import World
from tests.simulation.checks import Invariant
from tests.simulation.operators import QUARANTINED


class LivenessInvariant(Invariant):
    """Once the faults have stopped, every live trainer gets an Outcome in time, the head advances, pulls succeed.

    B1 and B2 hold for the deadlines of an ordinary seed: a lease of 7.6 s, orders 4 s, Apply and Persist 8 s, transfers
    12 s. They are sums of these; for longer ones they are as many times longer (Mix.patience). A cluster that nobody
    mends may keep a slot, perhaps the only one, until a transfer that is not named any more ends (docs/protocol.md,
    Timing): so much longer all others may wait, once.
    """

    number = 12
    OUTCOME_S = 45.0  # B1: for a trainer, from when faults stop or from its last Outcome
    HEAD_S = 40.0  # B2: for the head
    HEALED_S = 22.0  # after the faults: what their last transfers and leases left is over
    END_S = 10.0  # from a slave's SIGTERM to the end of its data flow
    PULLS = 2
    OUTCOMES = 3  # of each cluster without faults: it has healed

    def __init__(self, world: World, patience: float = 1.0) -> None:
        """`patience`: times the bounds, where links are slow by plan."""
        super().__init__(world)
        self.patience = patience
        self.advanced_at = 0.0
        self.finished_at: float | None = None
        self.received: dict[str, int] = {}  # cluster → Outcomes since the faults stopped
        self.dead: set[str] = set()  # clusters that nobody mends

    def outcome_received(self, agent: SimAgent, frozen: Frozen, outcome: Outcome) -> None:
        if self.world.heap.now > self.world.scenario.quiet_at and agent is self.world.clusters[agent.name].agent:
            self.received[agent.name] = self.received.get(agent.name, 0) + 1

    def healed(self) -> bool:
        """Has every cluster had the outcome of several pushes since the faults stopped?"""
        return all(self.received.get(cluster.name, 0) >= self.OUTCOMES for cluster in self.living())

    def living(self) -> list[SimCluster]:
        """The clusters that are waited for."""
        return [cluster for name, cluster in self.world.clusters.items() if name not in self.dead]

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self.advanced_at = self.world.heap.now
        elif isinstance(record, RunFinished):
            self.finished_at = self.world.heap.now
        elif isinstance(record, RunExtended | RolledBack):
            self.finished_at, self.advanced_at = None, self.world.heap.now

    def time_passed(self) -> None:
        now, quiet = self.world.heap.now, self.world.scenario.quiet_at
        timing = self.world.options.timing
        kept_s = timing.least_transfer_s + timing.lease_s if self.dead else 0.0
        outcome_s, head_s = self.OUTCOME_S * self.patience + kept_s, self.HEAD_S * self.patience + kept_s
        if now < quiet + min(outcome_s, head_s):
            return
        if self.finished_at is not None:
            self._all_finish(now - max(self.finished_at, quiet))
            return
        stood = now - max(self.advanced_at, quiet)
        self.require(stood < head_s, f"the head has not advanced for {stood:.1f} s without any fault")
        for cluster in self.living():
            agent = cluster.agent
            waited = now - max(agent.outcome_at, quiet) if agent else 0.0
            self.require(waited < outcome_s, f"{cluster.name} has had no Outcome for {waited:.1f} s without any fault")

    def _all_finish(self, since_s: float) -> None:
        for cluster in self.living() if since_s > self.OUTCOME_S * self.patience else ():
            done = cluster.agent is not None and cluster.agent.finished is not None
            self.require(done, f"{cluster.name} has not ended {since_s:.1f} s after the run, without any fault")

    def slave_ending(self, process: SlaveProcess, waited_s: float) -> None:
        self.require(waited_s < self.END_S, f"{process.name} has not ended {waited_s:.1f} s after SIGTERM")

    def pull_ended(self, agent: SimAgent, installed: bool, attempt: int) -> None:
        if agent.name in self.dead:
            return
        if not installed and self.world.heap.now > self.world.scenario.quiet_at + self.HEALED_S * self.patience:
            self.require(attempt < self.PULLS, f"{agent.name} has failed to pull {attempt} times without any fault")


# Of each sleep: a master that is idle for a heartbeat at most cannot see where a gap began, and ignores one as long.
UNSEEN_HEARTBEATS = 2


class LeaseInvariant(Invariant):
    """Silence counts only while somebody listens: nobody is judged silent whose heartbeat was read within its lease.

    Less what a master cannot know of its own absence.
    """

    number = 12

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.read: dict[tuple[str, str, int], tuple[float, int]] = {}  # when, by its waking hours; after which sleep

    def heartbeat_read(self, role: str, name: str, incarnation: int) -> None:
        self.read[role, name, incarnation] = self._now()

    def master_restored(self, state: LedgerState) -> None:
        self.read = dict.fromkeys(self.read, self._now())

    def _now(self) -> tuple[float, int]:
        return self.world.heap.now - self.world.master_asleep_s, self.world.master_sleeps

    def silence_judged(self, verdict: Event) -> None:
        if isinstance(verdict, ClusterSilent):
            self._lease("cluster", verdict.cluster, verdict.inc)
        elif isinstance(verdict, SlaveSilent):
            self._lease("slave", verdict.slave, verdict.sinc)

    def _lease(self, role: str, name: str, incarnation: int) -> None:
        read = self.read.get((role, name, incarnation))
        if read is not None:
            listened, sleeps = (now - then for now, then in zip(self._now(), read, strict=True))
            timing = self.world.options.timing
            lease = timing.lease_s - UNSEEN_HEARTBEATS * timing.heartbeat_s * max(1, sleeps)
            self.require(
                listened >= lease - 1e-6,
                f"{name}/{incarnation} is judged silent after {listened:.1f} s of listening, least {lease:g} s",
            )


OF_NORM = re.compile(r"above the hard cap|^score .* above|layers above")  # reasons of the gates that look at norms


class ReadmissionInvariant(Invariant):
    """A cluster that is gated `gate_patience` times in a row at a usual norm warms up again: nobody is out for good.

    But for those whose pushes were not finite: an operator looks at them first.
    """

    number = 12

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.rows: dict[str, PenaltyRow] = {}  # a round's record has those that it changed

    def record_written(self, record: Record) -> None:
        if isinstance(record, ClusterReadmitted):
            self.rows[record.penalty.cluster] = record.penalty
        if not isinstance(record, VersionCommitted | RoundEnded):
            return
        patience = self.world.options.penalty.gate_patience
        self.rows |= {row.cluster: row for row in record.penalty}
        for outcome in record.outcomes:
            cluster = outcome.push.cluster
            if outcome.kind != "gated" or outcome.norm == 0.0 or outcome.reason.startswith(QUARANTINED):
                continue
            row = self.rows[cluster]
            if row.gated_in_a_row < patience or row.broken or not OF_NORM.search(outcome.reason):
                continue
            others = [
                r.last_norm for r in self.rows.values() if r.cluster != cluster and r.accepted > 0 and r.last_norm > 0
            ]
            unusual = bool(others) and outcome.norm >= 2 * median(others)
            self.require(unusual, f"{cluster} was gated {row.gated_in_a_row} times in a row at norm {outcome.norm:.4g}")
